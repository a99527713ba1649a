"""The runtime of functions at a site: their isolates, packages, network access and logs."""
