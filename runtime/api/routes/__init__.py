"""One file per family of paths."""
