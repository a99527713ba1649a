"""The sharing of one arena among models."""
