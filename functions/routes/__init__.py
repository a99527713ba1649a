"""The functions' HTTP endpoints at a site."""
