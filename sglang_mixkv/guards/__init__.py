"""Guards against faults of SGLang. Each file names its fault, and the fix after which it can go."""
