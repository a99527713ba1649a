"""One API dialect per file, as router and runtime both know it."""
