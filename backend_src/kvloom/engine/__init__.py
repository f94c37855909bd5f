"""The engine: requests in, steps, answers out; its thread, and how it is built."""
