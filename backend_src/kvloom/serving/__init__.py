"""The models that Triton's Python backend runs: the only code that knows Triton."""
