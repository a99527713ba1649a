"""Libraries of the C files that a platform wheel brings along, one for each level of x86-64, so that nobody who installs it needs a compiler."""
