"""The engine host: a process with several models and one stream of frames."""
