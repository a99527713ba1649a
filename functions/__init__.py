"""Functions: code of others, run in processes of their own beside the runtime."""
