"""The HTTP API of a site: middleware, connections, routes, response builders."""
