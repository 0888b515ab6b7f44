"""The only code that imports SGLang, except plugin.py, guards/ and tools/plan_*.py: mixins for its
classes (manager.MIXINS), hooks, and the checks at start."""
