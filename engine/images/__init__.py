"""The images of sequences: their files, which of them are encoded, and who waits for that. Knows no tensors."""
