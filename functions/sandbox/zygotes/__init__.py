"""Zygotes: processes that have imported their modules and are forked on demand."""
