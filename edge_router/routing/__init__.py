"""Which site a request goes to: views of sites, the cost policy, placement, selection."""
