"""The class that Triton looks for in this file. It is implemented in the kvloom package."""

from kvloom.serving.generate import GenerateModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
