"""Services of the router besides forwarding: batches, deployments, fine-tunes, model lists, stored responses."""
