"""Pure-ASGI layers round every route; each is one callable shape, `app(scope, receive, send)`."""
