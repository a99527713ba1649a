"""Messages between clients, routers and sites: frozen structs and their byte forms.
Imports `support` only."""
