"""Network access of functions: HTTP requests, WebSockets and TCP sockets."""
