"""The kvloom command, and everything that starts a tritonserver and watches it."""
