"""How models share one arena."""
