"""Durable Objects: files, alarms, migrations."""
