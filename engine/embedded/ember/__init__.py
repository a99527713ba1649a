"""Ember, the model that ships with Pilotlight: its weights, and all that made them. Imports nothing by itself."""
