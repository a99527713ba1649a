"""The site's engine host and its models, as the HTTP side sees them."""
