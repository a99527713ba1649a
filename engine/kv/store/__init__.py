"""The store tier of the KV cache (Mooncake Store)."""
