"""One model's engine: sequences, steps, results."""
