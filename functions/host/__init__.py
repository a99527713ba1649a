"""The platform of functions at a site: pools of isolates, their confinement, and served functions."""
