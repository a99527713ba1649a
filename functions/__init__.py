"""Functions: other people's code, run in separate processes beside the runtime."""
