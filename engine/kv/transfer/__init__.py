"""Copies of blocks between device and host memory."""
