"""Quotas of accounts: per day (daily.py), and leases of limits that routers share (shared.py)."""
