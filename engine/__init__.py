"""The inference engine: token ids in, token ids out.

The client's half, `api` and `text`, can be imported without torch.
"""
