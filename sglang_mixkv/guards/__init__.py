"""Guards against SGLang's own faults. Each file names its fault, and the fix that ends the file."""
