"""The memory and speed of models on devices, in closed form. Imports no torch.

`pilotlight plan` shows the results, and hosts are started with them.
"""
