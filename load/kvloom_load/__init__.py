"""Load tests of a kvloom server with Locust, and the batching report of their results."""
