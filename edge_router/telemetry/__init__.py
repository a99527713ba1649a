"""Metrics, traces and status routes of the router."""
