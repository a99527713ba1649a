"""Guesses at the tokens that follow, which a step then checks: who makes them, how many are worth their rows, and how often they were right."""
