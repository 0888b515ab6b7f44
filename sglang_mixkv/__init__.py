"""sglang-mixkv: correct draft KV between prefill and decode servers in SGLang."""

__version__ = "0.4.0.dev0"
