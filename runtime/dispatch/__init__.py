"""Selection of the engine host for a sequence, and moves of sequences between hosts."""
