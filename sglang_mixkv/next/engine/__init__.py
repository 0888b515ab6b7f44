"""The draft channel in SGLang: the only importer of it beside today's engine/."""
