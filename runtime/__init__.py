"""One per site: the HTTP API, admission, streaming, and the supervision of its engine host. Never imports torch."""
