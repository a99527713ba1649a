"""Messages between routers and sites: headers, status, continuation, hints, usage."""
