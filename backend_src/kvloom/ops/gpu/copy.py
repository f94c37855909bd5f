"""Moving blocks of bytes inside a GPU's memory.

Between it and the host a block is one run of bytes on both sides, of hundreds of KiB and more, and the copy engines do
it at the bus's speed beside whatever the multiprocessors compute: see ``kvloom.kv.transfer``. Nothing in a server moves
blocks inside the GPU yet.
"""

import torch
import triton
import triton.language as tl

_WORDS = 4096
"""32-bit words that a program copies: 16 KiB, as 128-bit loads all in flight at once."""


@triton.jit
def _copy_blocks(source, target, pairs, words, WORDS: tl.constexpr):
    pair = tl.program_id(1)
    start = tl.load(pairs + 2 * pair) * words
    end = tl.load(pairs + 2 * pair + 1) * words
    offsets = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = offsets < words
    # words is a multiple of 4 where it has that specialization, and so are the starts
    tl.store(target + end + offsets, tl.load(source + start + offsets, mask=inside), mask=inside)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks of one GPU's memory to blocks of the same memory or another allocation.

    Args:
        source: uint8 [blocks, bytes of a block], contiguous; the size of a block is a multiple of 4.
        target: like ``source``, maybe with another number of blocks; may be ``source`` itself.
        pairs: int64 [N, 2] on the same GPU: a block of the source, and the block of the target that gets its content.
            No block of the target may come twice, or be one that is read too.
    """
    assert source.is_contiguous() and target.is_contiguous() and pairs.is_contiguous()
    assert source.shape[1] == target.shape[1] and source.shape[1] % 4 == 0
    words = source.shape[1] // 4
    # 65,535 pairs are the most that a grid's second dimension takes
    for chunk in pairs.split(65_535):
        grid = (triton.cdiv(words, _WORDS), len(chunk))
        _copy_blocks[grid](source.view(torch.int32), target.view(torch.int32), chunk, words, WORDS=_WORDS, num_warps=8)
