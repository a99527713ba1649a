"""The path from a checkpoint to an engine that is ready to step."""
