"""Sends each request to the site that will answer it first, and keeps the answer honest when a site dies. Imports wire and sites only."""
