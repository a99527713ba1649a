"""Models from elsewhere: packed ones from web servers, checkpoints from the Hugging Face hub."""
