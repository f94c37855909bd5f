"""Checks of the GPU kernels: the audit of their machine code, and the check on a GPU. Not part of a server."""
