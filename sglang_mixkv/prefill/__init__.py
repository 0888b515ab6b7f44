"""The draft channel on a prefill rank."""
