"""The path of weights from files to tensors: checkpoints, bundles, loaders and formats of matrices."""
