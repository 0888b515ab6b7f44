"""Whole clusters of the draft channel on a virtual clock: the real state machines, slots, gates,
breakers and messages, in a simulated world of networks, memory, processes and SGLang.

    spec, draw         what a schedule is: servers, requests, faults; one from a seed
    world              builds and runs one, on a virtual clock
    process, memory    the threads of a rank, what stops them, and what its memory holds
    workers, copies    the code of its worker without sockets; its copies, on a host or a GPU
    prefill, decode    one rank each: a machine, and what its worker works with
    network            connections between ranks, and reads
    sglang             plans, and the life of a request on each side
    faults             what goes wrong, a class for each kind; spared: which requests are warm
    checks             what must hold all the same
    judge              how long rooms may wait, and whose fault a cold one is: a second opinion
    mistakes           what is found, put into the code
    every              a small world in which little is late, and that in every way
    runner             many schedules, replay, and a failing one cut down
"""
