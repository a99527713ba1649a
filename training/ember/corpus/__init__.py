"""The text that trains Ember, one module per task; `mixture.py` combines them. Imports no module."""
