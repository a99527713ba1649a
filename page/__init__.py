"""The web page: static files, and the routes with their data.

It imports only `wire` of this project's packages; routers and sites mount it."""
