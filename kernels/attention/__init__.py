"""Paged attention: decode, prefill, verify, latent."""
