"""Functions' requests and sockets to the world."""
