"""Products with weights of 8 and 4 bits, which are widened in registers.

The product is transposed, weights first: their rows fill a matrix instruction whatever the number of rows of the input
is, and weights go through registers into it (as in Marlin, Frantar et al., 2024, and Machete). Where the columns of
programs do not fill a GPU, several share the sum over in_features; their parts are added in a fixed order.

Weights are words of 16 bits that hold 2 or 4 numbers each, of as many *planes* of a block of in_features: what the same
bits of a row's words hold are neighbours in the input, and a word is widened to bfloat16 in place.
"""

import triton
import triton.language as tl


@triton.jit
def _eights(words, PLANE: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """The signed bytes at place ``PLANE`` of words uint16, as floats.

    For bfloat16: 7 bits as the mantissa of 128 + n, and the sign bit as what makes -128 the double.
    """
    if PACKED and dtype == tl.bfloat16:
        if PLANE == 0:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 n, s, one; mov.b32 one, 0x3F803F80;
                lop3.b32 n, $1, 0x007F007F, 0x43004300, 0xEA; lop3.b32 s, $1, 0x00800080, 0xC300C300, 0xEA;
                fma.rn.bf16x2 $0, n, one, s; }""",
                "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            """{ .reg .b32 n, s, one; mov.b32 one, 0x3F803F80; shr.b32 s, $1, 8;
                lop3.b32 n, s, 0x007F007F, 0x43004300, 0xEA; lop3.b32 s, s, 0x00800080, 0xC300C300, 0xEA;
                fma.rn.bf16x2 $0, n, one, s; }""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    byte = words >> (8 * PLANE)
    if dtype == tl.bfloat16:
        number = ((byte & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
        return number + ((byte & 0x80) | 0xC300).to(tl.bfloat16, bitcast=True)
    return (byte & 0xFF).to(tl.uint8).to(tl.int8, bitcast=True).to(dtype)


@triton.jit
def _fours(words, PLANE: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr):
    """The numbers of 4 bits at place ``PLANE`` of words uint16, less 8, as floats.

    For bfloat16: as the mantissa of 128 + n.
    """
    if PACKED and dtype == tl.bfloat16:
        if PLANE == 0:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 n, one, c; mov.b32 one, 0x3F803F80; mov.b32 c, 0xC308C308;
                lop3.b32 n, $1, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, n, one, c; }""",
                "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        if PLANE == 1:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 n, one, c; mov.b32 one, 0x3F803F80; mov.b32 c, 0xC308C308; shr.b32 n, $1, 4;
                lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, n, one, c; }""",
                "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        if PLANE == 2:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 n, one, c; mov.b32 one, 0x3F803F80; mov.b32 c, 0xC308C308; shr.b32 n, $1, 8;
                lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, n, one, c; }""",
                "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            """{ .reg .b32 n, one, c; mov.b32 one, 0x3F803F80; mov.b32 c, 0xC308C308; shr.b32 n, $1, 12;
                lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $0, n, one, c; }""",
            "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    number = (words >> (4 * PLANE)) & 0xF
    if dtype == tl.bfloat16:
        return (number | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    return number.to(dtype) - 8.0


@triton.jit
def quantized_product(
    x, words, scales, zeros, out, rows, out_features, in_features, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out [SPLIT, rows, out_features] of x [rows, in_features] and words uint16 [blocks, out_features, WIDTH].

    PLANES is 2 for signed bytes, 4 for numbers of 4 bits. GROUP is how many planes have a scale together: scales and
    zeros are [blocks * PLANES / GROUP, out_features]; or it is 0, scales are [out_features] and there are no zeros.
    PACKED: widen two numbers by one instruction, on NVIDIA GPUs.
    """
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    height = tl.full([], 0, tl.int64) + out_features
    # rows beyond the last one repeat it and are not stored: no mask splits a load
    source_n = tl.minimum(n, out_features - 1)
    source_m = tl.minimum(m, rows - 1).to(tl.int64)
    k = tl.arange(0, WIDTH)
    share = tl.cdiv(blocks, SPLIT)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(part * share, tl.minimum(part * share + share, blocks), num_stages=STAGES):
        w = tl.load(words + (block * height + source_n[:, None]) * WIDTH + k[None, :])
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        inputs_sum = tl.zeros([ROWS], tl.float32)
        for plane in tl.static_range(PLANES):
            at = (block * PLANES + plane) * WIDTH + k
            inputs = x + source_m[None, :] * in_features + at[:, None]
            y = tl.load(inputs) if WHOLE else tl.load(inputs, mask=at[:, None] < in_features, other=0.0)
            numbers = _eights(w, plane, y.dtype, PACKED) if PLANES == 2 else _fours(w, plane, y.dtype, PACKED)
            if GROUP == 0:
                total = tl.dot(numbers, y, total)
            else:
                sums = tl.dot(numbers, y, sums)
                group = (block * PLANES + plane) // GROUP * height + source_n
                if zeros is not None:
                    inputs_sum += tl.sum(y.to(tl.float32), 0)
                if plane % GROUP == GROUP - 1:
                    if zeros is not None:
                        sums += (8.0 - tl.load(zeros + group).to(tl.float32))[:, None] * inputs_sum[None, :]
                        inputs_sum = tl.zeros([ROWS], tl.float32)
                    total += sums * tl.load(scales + group).to(tl.float32)[:, None]
                    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    if GROUP == 0:
        total *= tl.load(scales + source_n).to(tl.float32)[:, None]
    target = (part * rows + m[None, :]) * height + n[:, None]
    stored = (m[None, :] < rows) & (n[:, None] < out_features)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def add_parts(parts, out, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """out [size], the sum of parts fp32 [SPLIT, size], always in the same order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + part * size + place, mask=inside, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
