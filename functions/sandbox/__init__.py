"""The processes in which functions run: how they are confined and forked, and what they may use."""
