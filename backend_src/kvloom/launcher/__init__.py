"""The kvloom command. Starts a tritonserver and monitors it."""
