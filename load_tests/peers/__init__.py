"""Other engines, each run in an environment of its own on the same checkpoint: never a dependency, only something to be measured beside."""
