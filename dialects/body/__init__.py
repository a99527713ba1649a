"""Request bodies: their structs, their parsing and what is wrong with them."""
