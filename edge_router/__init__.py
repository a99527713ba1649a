"""Picks a site for each request, relays the stream, and goes on elsewhere when the site is lost. Knows wire/ and sites/ only."""
