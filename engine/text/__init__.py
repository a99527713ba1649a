"""Text to tokens and back: tokenizer, chat template, formats of answers. Imports no torch."""
