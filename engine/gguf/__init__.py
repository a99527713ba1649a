"""GGUF files of llama.cpp as checkpoints: metadata as a Hugging Face directory, and tensors."""
