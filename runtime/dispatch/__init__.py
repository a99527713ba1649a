"""Selection of the engine host for a sequence, and hand-over and failover between hosts."""
