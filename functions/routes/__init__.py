"""The HTTP endpoints of functions at a site."""
