"""Ops: each a signature and its torch form; the C++ and Triton forms are in cpu/ and gpu/."""
