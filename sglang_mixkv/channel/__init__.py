"""The draft channel: messages, slots, and the reads that move bytes; neither side's rules."""
