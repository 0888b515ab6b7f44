"""SGLang's Mooncake classes, extended: `plugin.py` hands these out of get_kv_class.

Call order, by process:

  prefill rank   MixKVManager()  -> registers itself with the bootstrap server, facts included
                 bootstrap thread: decode registers -> peer.admit -> route and plan, or a reason
                 transfer thread: send_kvcache / send_aux look the peer's plan up by session id
  bootstrap      MixKVBootstrapServer: /route as stock, /mixkv answers the prefill's facts
  decode rank    try_ensure_parallel_info -> facts compared -> receiver.init refuses, or
                 registers with each contacted prefill rank, its row of the routes table included
"""

from sglang_mixkv.engine.bootstrap import MixKVBootstrapServer
from sglang_mixkv.engine.manager import MixKVManager
from sglang_mixkv.engine.receiver import MixKVReceiver
from sglang_mixkv.engine.sender import MixKVSender

CLASSES = {
    "manager": MixKVManager,
    "sender": MixKVSender,
    "receiver": MixKVReceiver,
    "bootstrap_server": MixKVBootstrapServer,
}

__all__ = ["CLASSES", "MixKVBootstrapServer", "MixKVManager", "MixKVReceiver", "MixKVSender"]
