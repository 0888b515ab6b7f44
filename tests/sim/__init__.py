"""Whole clusters of the draft channel on a virtual clock: the real state machines, slots, gates,
breakers and messages, in a simulated world of networks, memory, processes and SGLang.

    spec, draw         a schedule: servers, requests, faults; and how a seed yields one
    world              builds and runs one, on a virtual clock
    process, memory    the threads of a rank, what stops them, and what its memory holds
    workers, copies    the code of its worker without sockets; its copies, on a host or a GPU
    prefill, decode    one rank each: a machine, and what its worker works with
    network            connections between ranks, and reads
    sglang             plans, and the life of a request on each side
    faults             what goes wrong, one class per kind; spared: which requests stay warm
    checks             what must hold nevertheless
    judge              how long rooms may wait, and whose fault a cold one is: a second opinion
    wire               whether a decode rank delayed its peers itself, by what happened to stamps
    mistakes           mistakes put into the code, which must be found
    every              a small world in which few things are late, in every possible way
    runner             many schedules, replay, and cutting down a failing one
"""
