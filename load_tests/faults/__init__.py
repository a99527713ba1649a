"""Faults, done to a network of real processes: its members, the links between them, their limits, their files, what they believe of each other."""
