"""A model's first answers, computed before torch is there: from a program that an earlier life of it has left."""
