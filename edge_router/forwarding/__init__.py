"""A request's way to sites and its answer's way back."""
