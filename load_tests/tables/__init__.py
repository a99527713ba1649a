"""Tables of the records: each function takes a record's results and yields rows, the header first.

report.py writes them to the pages."""
