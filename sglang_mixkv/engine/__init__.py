"""The only importer of SGLang (plugin.py's hooks and cpu/ apart): thin overrides of its classes.

Call order, by process:

    prefill rank   SidedManager() -> side, then SGLang's constructor: registers this rank with the
                   bootstrap server, facts included, and starts SGLang's threads
                   control thread: may_pass -> prefill.Gate
                   transfer threads: send_kvcache, send_aux -> PrefillRank
    bootstrap      MixKVBootstrapServer: /route as SGLang's, /mixkv answers the prefill's facts
    decode rank    scheduler: try_ensure_parallel_info -> DecodeRank.learn, or a refusal;
                   receiver.init -> registers with each prefill rank, route and all
                   decode thread: may_pass -> decode.Gate; update_status -> DecodeRank.land
"""
