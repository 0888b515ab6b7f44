"""The draft channel's two sides, beside today's until they take its place."""
