"""The web page: static files, and the routes that feed them.
Imports wire and nothing else of ours; routers and sites mount it."""
