"""Request bodies: their structs, parsing and error messages."""
