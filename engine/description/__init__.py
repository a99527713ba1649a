"""The description of a model by its config.json: sizes, layers, rotary rules and weights.

It is read once, and unsupported values are refused by name. Imports no torch.
"""
