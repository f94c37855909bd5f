"""Triton looks for this class in this file; it lives in the kvloom package."""

from kvloom.serving.generate import GenerateModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
