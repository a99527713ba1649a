"""API dialects, one file each, shared by router and runtime."""
