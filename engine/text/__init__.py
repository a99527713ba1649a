"""Conversion between text and tokens: tokenizer, chat template and answer formats. Imports no torch."""
