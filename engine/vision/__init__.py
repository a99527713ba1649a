"""Images of prompts: read, prepared, encoded, and kept until their tokens are computed."""
