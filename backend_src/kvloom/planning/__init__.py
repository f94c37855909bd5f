"""What fits: devices, dtypes, and the memory plan."""
