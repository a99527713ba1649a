"""The path of a step's input through the model to tokens."""
