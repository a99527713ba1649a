"""Matrix products and the formats of weights."""
