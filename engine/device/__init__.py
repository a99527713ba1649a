"""Device memory and copies between host and device."""
