"""Configuration files of a router and one site, with placeholders for ports and the location."""

PLACE = 'place = { city = "here", latitude = 0.0, longitude = 0.0 }\n'
NETWORK = """
listen = {{ port = {router} }}
{place}
[[sites]]
name = "ams1"
url = "http://127.0.0.1:{site}"
{place}
"""
