"""Parts for measuring a router's overhead: a site that computes nothing, a cheap client, the routers."""
