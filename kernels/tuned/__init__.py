"""Measured tables of product forms: one JSON file per device, named after it.

load_tests/tile_tuning.py measures them, and they are read when a model loads.
"""
