"""The text Ember learns from, one file a task; `mixture.py` joins them. Imports nothing by itself."""
