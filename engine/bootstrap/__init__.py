"""A model's first answers, computed without torch by a program that an earlier start has recorded."""
