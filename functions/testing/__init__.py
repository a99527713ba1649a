"""Support for authors' tests: serve a function with its bindings in real isolates."""
