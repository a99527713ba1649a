"""The process of one site: its HTTP API, functions and bindings, model residency and metering.

It reaches engines only by the engine protocol and never imports torch."""
