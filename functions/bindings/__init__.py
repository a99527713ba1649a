"""Bindings: the resources that functions reach as `self.env.NAME`, one file each.
What a function imports is in functions/sdk."""
