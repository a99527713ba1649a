"""One file per question asked of a running network."""
