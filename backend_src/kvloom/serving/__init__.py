"""The models that Triton's Python backend runs. No other code uses Triton's Python API."""
