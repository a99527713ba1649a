"""What requests used and what that costs: ledger, usage reports, objectives."""
