"""One request's generation: admission, prompt, sequences, output."""
