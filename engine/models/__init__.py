"""One file per model family, found by the architecture a checkpoint names."""
