"""What was measured: one JSON file per device, named as it is, written by kernels/tuning.py and read when a model loads."""
