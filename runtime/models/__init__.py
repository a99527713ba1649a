"""A site's models: where their weights are, how they wake, what they are asked for."""
