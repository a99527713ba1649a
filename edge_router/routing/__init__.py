"""The choice of a request's site: views of sites, the cost policy, placement, selection."""
