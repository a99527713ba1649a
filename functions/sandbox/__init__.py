"""The processes of functions: their confinement, zygotes, priorities and limits."""
