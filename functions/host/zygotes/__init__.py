"""The supply of zygotes for a site's functions, and their memory budget."""
