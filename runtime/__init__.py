"""One per site: the HTTP API, functions and bindings, residency, metering.

Reaches engines by their protocol and never imports torch."""
