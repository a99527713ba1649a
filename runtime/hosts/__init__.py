"""Engine hosts: their start, supervision and placement on devices."""
