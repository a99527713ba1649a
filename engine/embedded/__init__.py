"""Models that ship inside the package."""
