"""Code that several folders of tests share. Helpers for a single folder are kept in that folder.

channel    the draft channel without SGLang: machines, threads, data planes, prefill servers
ring       SGLang's own managers, one process per rank, and the expected bytes
process    processes, HTTP servers and stores, and the resources of a process
"""
