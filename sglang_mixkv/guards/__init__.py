"""Guards against SGLang's own faults. Each file says which fault ends it, and when."""
