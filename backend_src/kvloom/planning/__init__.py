"""Chooses the device and dtypes, and plans memory."""
