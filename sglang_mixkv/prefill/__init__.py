"""A prefill rank of the draft channel."""
