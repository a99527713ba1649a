"""HTTP on sockets: a server and a client, WebSockets, tunnels, and how a process listens. ASGI in; knows nothing of ours but errors."""
