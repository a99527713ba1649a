"""All operations of the engine by name: in plain torch, with a Triton form for GPUs.

Imports no other package of the project.
"""
