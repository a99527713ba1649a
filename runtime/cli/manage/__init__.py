"""`pilotlight manage`."""
