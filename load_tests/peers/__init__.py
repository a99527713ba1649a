"""Other engines, each run in a separate environment on the same checkpoint.

They are never dependencies, only compared with.
"""
