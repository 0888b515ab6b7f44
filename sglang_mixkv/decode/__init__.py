"""A decode rank of the draft channel."""
