"""Functions: code of others, run in its own processes beside the runtime."""
