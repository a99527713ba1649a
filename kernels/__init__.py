"""All operations of the engine: each in plain torch, most also in Triton for GPUs or C for CPUs.

Imports no other package of the project.
"""
