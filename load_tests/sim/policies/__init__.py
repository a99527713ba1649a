"""Policies that other routers use, one a file, as the simulation compares them with the router's own (edge_router/routing/cost.py)."""
