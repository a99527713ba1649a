"""The storage formats of matrices in checkpoints: one file each, found by its name in config.json."""
