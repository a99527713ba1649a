"""Ember, the model that ships with Pilotlight: its weights and their sources. Imports nothing itself."""
