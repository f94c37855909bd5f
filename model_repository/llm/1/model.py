"""Triton looks for this class in this file; it lives in the kvloom package."""

from kvloom.serving.llm import LlmModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
