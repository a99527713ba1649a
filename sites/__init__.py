"""Configuration files: one for each site, one for a router, and their typed reader.
Imports no other package."""
