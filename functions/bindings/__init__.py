"""Bindings: the resources that functions use as `self.env.NAME`, one file each.

The classes that functions see are in functions/sdk.
"""
