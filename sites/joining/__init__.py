"""How a machine becomes a site of a network: the network's folder with its authority, its tokens and its secret."""
