"""Services of the router beside forwarding: batches, deployments, fine-tunes, lists of models, kept responses."""
