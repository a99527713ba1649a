"""Models from elsewhere: packed ones from web servers, chunk by chunk, and checkpoints from the Hugging Face hub."""
