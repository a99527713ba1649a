"""The parsers of config.json, by model family."""
