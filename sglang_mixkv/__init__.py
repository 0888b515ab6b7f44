"""sglang-mixkv: right draft KV across prefill and decode in SGLang."""

__version__ = "0.4.0.dev0"
