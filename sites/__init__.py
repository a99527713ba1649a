"""One TOML file per location, one for the router's view of the network, and the typed reader of both. Imports nothing of ours."""
