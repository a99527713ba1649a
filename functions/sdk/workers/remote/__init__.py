"""RPC between functions."""
