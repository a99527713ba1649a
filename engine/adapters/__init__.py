"""Low-rank adapters of a model: their content, their slots on the device, and waiting sequences."""
