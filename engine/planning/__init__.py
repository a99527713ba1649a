"""Computes the memory and speed of models on devices from formulas. Imports no torch.

`pilotlight plan` shows the results, and hosts are started with them.
"""
