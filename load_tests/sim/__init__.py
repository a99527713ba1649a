"""The network in virtual time, with the router's own policy, session table and book-keeping.

Sites, clients and links are modelled.
"""
