"""Makes triton's interpreter compute bfloat16 as a GPU does.

The interpreter keeps bfloat16 as uint16 and computes with the bit patterns as if they were numbers. Here operands are
widened to float32 and results rounded to nearest even. Reductions and scans of bfloat16 are refused: kernels widen
before them.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
FLOATS = (tl.bfloat16, tl.float16, tl.float32)


def is_bfloat16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widen(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype(np.uint16)


def numbers_of(handle: Any) -> np.ndarray:
    return widen(handle.data) if is_bfloat16(handle) else handle.data


def widened(handle: Any) -> Any:
    return Handle(widen(handle.data), tl.float32) if is_bfloat16(handle) else handle


def teach_interpreter() -> None:
    """Replace what the interpreter does with bfloat16, from now on and in this process."""
    builder = interpreter.InterpreterBuilder
    binary, unary, ternary = builder.binary_op, builder.unary_op, builder.ternary_op
    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def binary_op(self, left, right, op):
        if not is_bfloat16(left):
            return binary(self, left, right, op)
        result = op(widen(left.data), widen(right.data))
        return Handle(result, tl.int1) if result.dtype == np.bool_ else Handle(narrow(result), tl.bfloat16)

    def unary_op(self, value, op):
        if not is_bfloat16(value):
            return unary(self, value, op)
        return Handle(narrow(op(widen(value.data))), tl.bfloat16)

    def ternary_op(self, left, right, other, op):
        if op is np.where or not is_bfloat16(right):
            return ternary(self, left, right, other, op)
        return Handle(narrow(op(numbers_of(left), numbers_of(right), numbers_of(other))), tl.bfloat16)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self, source, to):
        target = to.scalar
        if is_bfloat16(source) and target != tl.bfloat16:
            wide = widened(source)
            return wide if target == tl.float32 else cast(self, wide, to)
        if target == tl.bfloat16 and not is_bfloat16(source):
            return Handle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, to)

    def create_fp_to_fp(self, source, to, rounding_mode):
        if source.dtype.scalar in FLOATS and to.scalar in FLOATS:
            return cast_impl(self, source, to)
        return convert(self, source, to, rounding_mode)

    def get_bf16(self, value):
        return Handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16)

    replacements = {
        "binary_op": binary_op,
        "unary_op": unary_op,
        "ternary_op": ternary_op,
        "create_dot": create_dot,
        "cast_impl": cast_impl,
        "create_fp_to_fp": create_fp_to_fp,
        "get_bf16": get_bf16,
    }
    for name, function in replacements.items():
        setattr(builder, name, function)
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply = _refusing_bfloat16(operation.apply)


def _refusing_bfloat16(apply: Any) -> Any:
    def checked(self, operands):
        for operand in operands if isinstance(operands, tuple) else (operands,):
            if isinstance(operand, tl.tensor) and is_bfloat16(operand.handle):
                raise NotImplementedError("reduction of bfloat16: widen to float32 in the kernel first")
        return apply(self, operands)

    return checked
