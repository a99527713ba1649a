"""The engine protocol and its clients. Imports no torch."""
