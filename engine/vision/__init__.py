"""Images of prompts: read, prepared as the checkpoint's processor does, encoded, and kept until their tokens are computed."""
