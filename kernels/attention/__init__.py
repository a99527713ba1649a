"""Attention over the paged cache: decode, prefill, verification of drafts, and latent attention."""
