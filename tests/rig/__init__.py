"""What several tests share. What one folder of tests uses stands in that folder.

channel    the draft channel without SGLang: machines, threads, data planes, prefill servers
ring       SGLang's own managers, a process per rank, and the truth that bytes are compared with
process    processes, HTTP servers and stores, and what a process holds
"""
