"""Parts to measure what a router adds: a site that computes nothing, a cheap client, the routers."""
