"""Downloads of models: packed models from web servers, checkpoints from the Hugging Face hub."""
