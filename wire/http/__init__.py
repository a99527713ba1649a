"""HTTP on sockets: server, client, WebSockets, stock servers, how a process listens.
ASGI in; knows nothing of ours but errors."""
