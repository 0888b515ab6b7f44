"""The only importer of SGLang, but for plugin.py and tools/plan_*.py: mixins over its classes.

prefill rank   DraftManager: this rank's row goes with its registration, a PrefillWorker beside it;
               DraftSender: each chunk that SGLang sends also goes to it
bootstrap      DraftBootstrapServer: GET /mixkv answers the rows of all prefill ranks
decode rank    DraftManager: no request before a server's rows fit, a DecodeWorker beside it;
               DraftReceiver: each request has a room in it
"""
