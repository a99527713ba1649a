"""Every operation of the engine by name: plain torch today, Triton beside it where a GPU wants it. Imports nothing of
ours."""
