"""The only importer of SGLang, but for plugin.py and tools/plan_*.py: mixins over its classes.

prefill rank   DraftManager: registers with this rank's row, and has a PrefillWorker;
               DraftSender: gives it each chunk that SGLang sends
bootstrap      DraftBootstrapServer: GET /mixkv answers the rows of all prefill ranks
decode rank    DraftManager: no request before a server's rows fit, and has a DecodeWorker;
               DraftReceiver: opens each request on it
"""
