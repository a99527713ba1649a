"""HTTP on sockets: server, client, WebSockets, stock servers, listening.
ASGI in; imports only the errors."""
