"""Pilotlight: serverless LLM inference for a network of sites. The packages are links to the folders at the top of the repository."""
