"""Parts that several folders of tests share. Helpers for a single folder of tests are kept there.

channel    the draft channel without SGLang: machines, threads, data planes, prefill servers
ring       SGLang's own managers, one process per rank, and the truth that bytes are compared with
process    processes, HTTP servers and stores, and what a process holds
"""
