"""Usage of requests and its cost: ledger, usage reports, objectives."""
