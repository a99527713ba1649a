"""A site's models: where their weights are, how they are loaded, and the demand for them."""
