"""Ranks on other machines."""
