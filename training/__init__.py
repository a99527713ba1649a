"""Training of the embedded model: its corpus and its programs. Not in the wheel."""
