"""Steps of workflows."""
