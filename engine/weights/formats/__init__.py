"""How checkpoints keep their matrices: one file per format, found by its name in config.json (weight_formats.py)."""
