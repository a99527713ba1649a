"""Attention over the paged cache: of decodes, prompts and drafts to verify, and of latent vectors."""
