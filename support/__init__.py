"""What processes need beside messages: SQLite's thread, whole files, counters in mapped memory, signals, forms, credentials."""
