"""Conversion between text and token ids, by the tokenizer of a checkpoint. Imports no torch."""
