"""The choice of the sequences and tokens of the next step."""
