"""Parts of models: each knows its weights and its kernels, but not its model."""
