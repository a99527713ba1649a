"""`pilotlight network` and `pilotlight join`."""
