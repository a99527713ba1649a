"""Measured tables of product forms: one JSON file per device, named after it.

kernels/tuning.py writes them, and they are read when a model loads.
"""
