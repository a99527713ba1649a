"""The KV blocks of one model on its device."""
