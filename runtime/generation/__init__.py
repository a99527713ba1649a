"""The generation of one answer: admission, prompt, sequences, output."""
