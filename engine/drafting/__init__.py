"""Drafts of the next tokens for steps to verify: drafters, the number that pays off, acceptance rates."""
