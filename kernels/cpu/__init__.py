"""What a CPU needs beyond torch: a small C library, built on the machine that runs it, and its operations as functions of tensors."""
