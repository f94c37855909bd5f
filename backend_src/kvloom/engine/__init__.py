"""The engine, which turns requests into answers step by step; its thread; and the code that builds it."""
