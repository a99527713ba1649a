"""Ember with a LoRA adapter for long, mostly predictable answers, on which drafts are measured."""
