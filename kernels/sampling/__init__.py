"""From logits to tokens: masks, penalties, sampling, log probabilities."""
