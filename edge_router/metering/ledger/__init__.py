"""The ledger: usage of each account and model, and its cost. Read ledger.py first."""
