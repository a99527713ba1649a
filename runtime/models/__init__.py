"""A site's models: where their weights are, how they wake, and the demand for them."""
