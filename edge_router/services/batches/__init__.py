"""Batches: requests that are answered within a day, with idle capacity of the network."""
