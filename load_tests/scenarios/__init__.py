"""One file per question about a running network."""
