"""Programs that rewrite checkpoints: packing, quantizing."""
