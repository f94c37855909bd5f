"""Runs steps: builds their tensors and computes them on a CPU or a GPU, from recordings where possible."""
