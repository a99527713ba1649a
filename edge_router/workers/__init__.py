"""Several processes that serve as one router: a supervisor, and workers that share its port."""
