"""Grammars that answers must follow, and their token masks."""
