"""The description of a model in its config.json: sizes, layers, rotary rules, weights.

It is read once, and unsupported values are refused by name. Imports no torch.
"""
