"""Tests by authors of functions: a function with its bindings in real isolates, one test at a time."""
