"""Guards against bugs in SGLang. Each file names the bug, and the fix that replaces the guard."""
