"""Decodes, prepares and encodes images of prompts, and keeps the embeddings while they are needed."""
