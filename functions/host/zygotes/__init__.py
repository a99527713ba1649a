"""Zygotes: processes that have imported and wait to be forked."""
