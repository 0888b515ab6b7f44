"""A simulator of whole clusters: the plugin's real state machines, slots, gates, breakers and
messages on a virtual clock, with simulated networks, memory, processes and SGLang engines.

    spec, draw         a schedule (servers, requests, faults), and how a seed generates one
    world              builds a cluster from a schedule and runs it
    process, memory    the threads of a rank, the faults that stop them, and its memory
    workers, copies    the worker's code without sockets, and its copies on a host or a GPU
    prefill, decode    one rank of either side: its machine and its worker
    network            connections between ranks, and reads
    sglang             plans, and the life of a request on each side
    faults             the faults, one class per kind
    spared             which requests must stay warm in spite of the faults
    checks             the invariants
    judge              an independent model of decode's deadlines, strikes and breakers
    wire               an independent model of whether a decode rank delayed its peers itself
    mistakes           defects put into the code, which the simulator must find
    every              all schedules of a small world with a few late steps or faults
    runner             runs many schedules, replays one, and shrinks a failing one
"""
