"""The images of sequences: files, encoded images, and waiting sequences. Does not know tensors."""
