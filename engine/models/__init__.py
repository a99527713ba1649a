"""The families of models, one file each, found by the architecture that a checkpoint names."""
