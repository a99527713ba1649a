"""Tables of the records: each function takes a record's results and yields rows, the header first.

The pages that show them are report.py's."""
