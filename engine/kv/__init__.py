"""Where keys and values live and how they are found again."""
