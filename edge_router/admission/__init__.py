"""Which requests are admitted: keys, limits, quotas."""
