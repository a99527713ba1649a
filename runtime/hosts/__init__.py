"""Engine hosts: started, supervised, placed on devices."""
