"""The functions' platform at a site: pools of isolates, their processes and confinement, and the served functions."""
