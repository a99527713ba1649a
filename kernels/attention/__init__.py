"""Attention over the paged cache: for decodes, for prompts, for drafts to verify, to latent vectors."""
