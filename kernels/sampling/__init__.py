"""The steps from logits to tokens: masks, penalties, sampling, log probabilities."""
