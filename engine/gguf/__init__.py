"""GGUF files, llama.cpp's, as checkpoints: what their metadata says in the words of a Hugging Face directory, and where their tensors lie."""
