"""The images of sequences: their files, which are encoded, which sequences wait. Knows no tensors."""
