"""Which sequences compute which tokens next."""
