"""Policies that others use, one a file, as the simulation compares them with the router's own (edge_router/routing/cost.py)."""
