"""The text on which Ember is trained, one module per task; `mixture.py` combines them.

Importing the package imports no module of it.
"""
