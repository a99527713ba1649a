"""Secrets of functions."""
