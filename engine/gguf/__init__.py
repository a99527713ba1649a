"""Reads GGUF files of llama.cpp as if they were Hugging Face checkpoints."""

SUFFIX = ".gguf"
