"""Admission of requests: keys, limits, quotas."""
