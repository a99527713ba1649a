"""Sites as the router sees them: probes, status, round trips, lateness."""
