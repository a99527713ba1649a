"""The runtime of functions at a site: their processes, confinement, packages, network access and logs."""
