"""The functions' platform at a site: pools of isolates, the processes they live in, what confines them, and which functions are served."""
