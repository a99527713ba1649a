"""The parts around a model's tokens: chat templates, images in prompts, and answer formats. Imports no torch."""
