"""The images of sequences: files, encoded images and waiting sequences. Independent of tensors."""
