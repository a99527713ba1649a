"""A simulated router and its sites in virtual time, under faults drawn from a seed: `python -m tests.simulation`."""
