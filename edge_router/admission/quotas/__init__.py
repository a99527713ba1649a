"""What accounts may use: of a day (daily.py), and of all limits the parts that routers of one network lend each other (shared.py)."""
