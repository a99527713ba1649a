"""Programs that rewrite checkpoints: packing and quantizing."""
