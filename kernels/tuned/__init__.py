"""Tables of measured forms of products: one JSON file per device, named after it.

load_tests/tile_tuning.py measures them. They are read when a model loads.
"""
