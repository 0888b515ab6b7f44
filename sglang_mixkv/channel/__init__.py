"""The draft channel, shared by both sides: messages, slots, and the reads that move bytes."""
