"""The network in virtual time: the router's own policy, session table and book-keeping over modelled sites, clients and links."""
