"""Quotas of accounts: per day (daily.py), and leases of limits that the routers of one network share (shared.py)."""
