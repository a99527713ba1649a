"""A network of routers and sites in virtual time, under faults that a seed has drawn: `python -m tests.simulation`."""
