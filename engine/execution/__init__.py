"""The computation of a step: from its input through the model to tokens."""
