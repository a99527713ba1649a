"""Tests of functions by their authors: a function with its bindings, in real isolates, for one test at a time."""
