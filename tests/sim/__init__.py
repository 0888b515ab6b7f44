"""Whole clusters of the draft channel on a virtual clock: the real state machines, slots, gates,
breakers and messages, in a simulated world of networks, memory, processes and SGLang.

    spec      what a schedule is: servers, requests, faults; drawn from a seed
    world     builds and runs one; clock, process, network, plane and memory are what it is made of
    prefill, decode    one rank each: a machine and the executor of its actions; copiers copy rows
    groups    SGLang: the life of a request on each side
    faults, hostile    what goes wrong; checks, breaker: what must hold all the same
    runner    many schedules, replay; shrink cuts a failing one down
    mutations    defects that the simulator must find
"""
