"""Streaming clients for kvloom models on Triton Inference Server."""
