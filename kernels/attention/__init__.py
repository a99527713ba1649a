"""Attention over the paged cache, for decodes, for prompts, for drafts to verify, and to latent vectors."""
