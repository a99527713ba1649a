"""The ledger: what each account has used of which model, and what that cost. Read ledger.py first."""
