"""What crosses a socket between clients, routers and sites: frozen messages and their byte forms. Imports nothing of ours."""
