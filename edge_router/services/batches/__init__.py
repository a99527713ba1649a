"""Batches: requests that are answered within a day, by whatever the network has idle."""
