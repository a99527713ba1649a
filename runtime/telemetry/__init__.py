"""Metrics, traces and timelines of a site."""
