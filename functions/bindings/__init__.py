"""Bindings: the resources that functions reach as `self.env.NAME`, one file each.
The library for functions is in functions/sdk."""
