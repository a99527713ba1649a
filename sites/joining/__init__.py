"""Files of a network that machines can join: its authority, tokens, secret and the router's file."""
