"""The Fetch standard's classes: requests, responses, headers, bodies, streams."""
