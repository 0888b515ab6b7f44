"""The only importer of SGLang, but for plugin.py, guards/ and tools/plan_*.py: mixins over its
classes (manager.MIXINS), hooks, and the checks at start."""
