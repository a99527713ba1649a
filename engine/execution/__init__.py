"""A step's input through the model to tokens."""
