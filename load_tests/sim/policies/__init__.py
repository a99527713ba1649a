"""Policies of other routers, one per file, for comparison with our own (edge_router/routing/cost.py)."""
