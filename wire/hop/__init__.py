"""Messages between routers and sites: headers, status, continuation, hints, lending, usage."""
