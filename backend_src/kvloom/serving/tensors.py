"""Makes tensors of the types that the interface declares."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kvloom.serving.interface import INPUTS, OUTPUTS, Type

_NUMPY: dict[Type, type] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP32": np.float32,
}

_DTYPES = {declared.name: _NUMPY[declared.type] for declared in (*INPUTS, *OUTPUTS)}


def tensor(name: str, *values: object) -> Any:
    """Make an input or output (``pb_utils.Tensor``) of shape [1, n] with these values."""
    elements = [value.encode() if isinstance(value, str) else value for value in values]
    return pb_utils.Tensor(name, np.array([elements], dtype=_DTYPES[name]))
