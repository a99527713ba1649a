"""Ember with a LoRA adapter for long answers, most of which is known beforehand: what drafts are measured on."""
