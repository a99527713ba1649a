"""Chat templates, images in prompts, and answer formats. Imports no torch."""
