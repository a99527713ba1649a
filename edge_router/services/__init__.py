"""Services of the router besides forwarding, such as batches, deployments and model lists."""
