"""config.json of each model family."""
