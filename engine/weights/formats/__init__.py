"""The formats of checkpoints' matrices: one file each, found by its name in config.json."""
