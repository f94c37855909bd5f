"""Load tests of a kvloom server with Locust, and what they say about its batching."""
