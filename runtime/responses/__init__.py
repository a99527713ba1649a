"""Pieces as OpenAI's objects and chunks: one file per shape of answer."""
