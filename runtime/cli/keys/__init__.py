"""`pilotlight keys`."""
