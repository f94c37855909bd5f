"""Products with weights of 8 and 4 bits, which are widened in registers.

The product is transposed, weights first. So the weights' rows fill a matrix instruction for any number of input rows,
and weights pass through registers (as in Marlin, Frantar et al., 2024, and Machete). If there are too few columns of
programs for the GPU, several programs share the sum over in_features. Their parts are added in a fixed order.

Weights are 16-bit words of 2 or 4 numbers. A block of in_features has as many *planes*: the same bits of a row's words
hold neighbouring inputs, and each plane is widened to bfloat16 in place. Scales and minima are pairs of fp16 in 32-bit
words, the smallest size for asynchronous loads.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _bytes_to_bf16(place):
    """PTX that widens the signed bytes at one place of two words to bfloat16.

    The lower 7 bits become the mantissa of 128 + n. The sign bit becomes -128 or, if it is set, -256, which is added.
    """
    shift = "mov.b32 w, $1;" if place == 0 else "shr.b32 w, $1, 8;"
    return (
        "{ .reg .b32 w, n, s, one; mov.b32 one, 0x3F803F80; " + shift + " lop3.b32 n, w, 0x007F007F, 0x43004300, 0xEA; "
        "lop3.b32 s, w, 0x00800080, 0xC300C300, 0xEA; fma.rn.bf16x2 $0, n, one, s; }"
    )


@triton.constexpr_function
def _fours_to_bf16(place, middle):
    """PTX that widens the 4-bit numbers at one place of two words: they become the mantissa of 128 + n.

    Then it subtracts 128 + ``middle``.
    """
    shift = "mov.b32 n, $1;" if place == 0 else f"shr.b32 n, $1, {4 * place};"
    widen = "lop3.b32 n, n, 0x000F000F, 0x43004300, 0xEA;"
    less = {-128: "mov.b32 $0, n;", 8: "fma.rn.bf16x2 $0, n, one, c;"}[middle]
    constants = ".reg .b32 n, one, c; mov.b32 one, 0x3F803F80; mov.b32 c, 0xC308C308;"
    return "{ " + constants + " " + shift + " " + widen + " " + less + " }"


@triton.jit
def _numbers(
    words, PLACE: tl.constexpr, PLANES: tl.constexpr, MIDDLE: tl.constexpr, dtype: tl.constexpr, PACKED: tl.constexpr
):
    """The numbers at ``PLACE`` in words, uint16, as floats: signed bytes, or 4-bit numbers minus ``MIDDLE``."""
    if PACKED and dtype == tl.bfloat16:
        code: tl.constexpr = _bytes_to_bf16(PLACE) if PLANES == 2 else _fours_to_bf16(PLACE, MIDDLE)
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    part = words >> (16 // PLANES * PLACE)
    if dtype == tl.bfloat16:
        if PLANES == 2:
            number = ((part & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
            return number + ((part & 0x80) | 0xC300).to(tl.bfloat16, bitcast=True)
        number = ((part & 0xF) | 0x4300).to(tl.bfloat16, bitcast=True)
        return number if MIDDLE == -128 else number - (128.0 + MIDDLE)
    if PLANES == 2:
        return (part & 0xFF).to(tl.uint8).to(tl.int8, bitcast=True).to(dtype)
    return (part & 0xF).to(dtype) - MIDDLE


@triton.jit
def _half(pair, PLACE: tl.constexpr):
    """The fp16 in the low or high half of an int32, as fp32."""
    return ((pair >> (16 * PLACE)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def quantized_product(
    x, words, pairs, out, rows, out_features, in_features, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MINIMA: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Multiply x [rows, in_features] by words uint16 [blocks, out_features, WIDTH] to out [splits, rows, out_features].

    PLANES is 2 for signed bytes and 4 for 4-bit numbers. GROUP is the number of planes that share a scale. With MINIMA
    pairs are int32 [groups, out_features] of a scale (low half) and a minimum, otherwise [groups / 2, out_features] of
    the scales of two groups. PACKED widens two numbers per instruction, on NVIDIA GPUs.
    """
    # With minima bfloat16 numbers stay at 128 + n, which saves a subtraction. The minimum's term corrects that
    MIDDLE: tl.constexpr = 8 if not MINIMA else -128 if x.dtype.element_ty == tl.bfloat16 else 0
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    height = tl.full([], 0, tl.int64) + out_features
    # Rows after the last one repeat it and are not stored, because a mask would split the loads
    source_n = tl.minimum(n, out_features - 1)
    source_m = tl.minimum(m, rows - 1).to(tl.int64)
    k = tl.arange(0, WIDTH)
    share = tl.cdiv(blocks, tl.num_programs(1))
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(part * share, tl.minimum(part * share + share, blocks), num_stages=STAGES):
        w = tl.load(words + (block * height + source_n[:, None]) * WIDTH + k[None, :])
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        inputs_sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for plane in tl.static_range(PLANES):
            at = (block * PLANES + plane) * WIDTH + k
            inputs = x + source_m[None, :] * in_features + at[:, None]
            y = tl.load(inputs) if WHOLE else tl.load(inputs, mask=at[:, None] < in_features, other=0.0)
            numbers = _numbers(w, plane, PLANES, MIDDLE, y.dtype, PACKED)
            sums = tl.dot(numbers, y, sums, input_precision="ieee")
            if MINIMA:
                # Each row of this product is the sum of the inputs. Matrix units are idle, while a reduction takes time
                ones = tl.full([COLUMNS, WIDTH], 1.0, y.dtype)
                inputs_sums = tl.dot(ones, y, inputs_sums, input_precision="ieee")
            if plane % GROUP == GROUP - 1:
                group = (block * PLANES + plane) // GROUP
                if MINIMA:
                    pair = tl.load(pairs + group * height + source_n)
                    scale = _half(pair, 0)
                    total += scale[:, None] * sums
                    total += (_half(pair, 1) + scale * MIDDLE)[:, None] * inputs_sums
                    inputs_sums = tl.zeros([COLUMNS, ROWS], tl.float32)
                else:
                    if plane // GROUP % 2 == 0:
                        pair = tl.load(pairs + group // 2 * height + source_n)
                    total += _half(pair, plane // GROUP % 2)[:, None] * sums
                sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    target = (part * rows + m[None, :]) * height + n[:, None]
    stored = (m[None, :] < rows) & (n[:, None] < out_features)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["size", "parts_count"])
def add_parts(parts, out, size, parts_count, BLOCK: tl.constexpr):
    """Compute out [size], the sum of parts, fp32 [parts_count, size], in a fixed order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, parts_count):
        total += tl.load(parts + part * size.to(tl.int64) + place, mask=inside, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantized_rows(
    ids, words, pairs, out, out_features, in_features,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr,
):  # fmt: skip
    """Write rows ``ids``, int64 [T], of a weight to out, fp32 [T, in_features]. See also ``quantized_product``."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(ids + place)
    k = tl.arange(0, WIDTH)
    height = tl.full([], 0, tl.int64) + out_features
    w = tl.load(words + (block * height + row) * WIDTH + k)
    for plane in tl.static_range(PLANES):
        group = (block * PLANES + plane) // GROUP
        numbers = _numbers(w, plane, PLANES, 0 if MINIMA else 8, tl.float32, False)
        if MINIMA:
            pair = tl.load(pairs + group * height + row)
            numbers = numbers * _half(pair, 0) + _half(pair, 1)
        else:
            pair = tl.load(pairs + group // 2 * height + row)
            numbers *= _half(pair >> (16 * (group % 2)), 0)
        at = (block * PLANES + plane) * WIDTH + k
        tl.store(out + place * in_features + at, numbers, mask=at < in_features)
