"""Low-rank adapters of a model: what one adds to its projections, the slots they are computed from, and who waits for one."""
