"""What a router adds to a request: a site that computes nothing, a client that costs little, and the routers that stand between them."""
