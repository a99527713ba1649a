"""What functions were asked and what became of it: records of invocations, kept in SQLite and sent to the functions that consume them."""
