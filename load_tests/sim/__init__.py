"""A simulation of the network in virtual time.

The router's policy, session table and book-keeping are the real code; sites, clients and links are models.
"""
