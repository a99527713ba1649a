"""A request as the router reads it: head, body, session, preferences, place of the client."""
