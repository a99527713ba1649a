"""Parts that models are made of: each knows its weights and its kernels, none knows its model."""
