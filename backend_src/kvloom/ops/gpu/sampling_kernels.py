"""Kernels that choose tokens. ``kvloom.ops.gpu.sampling`` describes how they work together.

A score's *key* is the bit pattern of its distance from its row's largest score after temperature: an int32 that grows
as the score falls. A score's *weight* is its probability times a constant in fixed point. Sums of integers are the same
in any order, so results do not depend on how work is divided.
"""

import triton
import triton.language as tl

FINE = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)
STUCK = tl.constexpr(2)

_IMPOSSIBLE = tl.constexpr(0x7F800000)
"""The key of a score of -inf, the largest key."""

_NO_WEIGHT = tl.constexpr(0x41FA0000)
"""The key of the distance 31.25. From there on a weight rounds to 0."""

_WEIGHT_OF_LARGEST = tl.constexpr(17592186044416.0)
"""2^44. The weights of 2^18 tokens fit into an int64, and a token 2^-44 times as likely as the first still counts."""

_SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _below(scores, peak, temperature):
    """The scores minus the largest score, after temperature. At most 0."""
    return (scores - peak) * (1.0 / tl.maximum(temperature, _SMALLEST_NORMAL))


@triton.jit
def _keys(scores, peak, temperature, min_p):
    """Keys of scores. Scores that min-p removes get the key of -inf."""
    below = _below(scores, peak, temperature)
    below = tl.where(below < tl.log(min_p), float("-inf"), below)
    return tl.abs(below).to(tl.int32, bitcast=True)


@triton.jit
def _weights(keys):
    """The weights, int64, of keys."""
    below = keys.to(tl.float32, bitcast=True)
    return (tl.exp(-below) * _WEIGHT_OF_LARGEST + 0.5).to(tl.int64)


@triton.jit
def survey(
    scores, stride, vocab, temperature, tops, firsts, sums, tempered, broken, groups,
    TILE: tl.constexpr, GROUP: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Find a tile's largest score and its first place, the sum of exp relative to it, and whether all are finite.

    With SAMPLED also the sum after temperature, and the largest score of each group of neighbours.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    out = row * tl.num_programs(1) + tile
    places = tile * TILE + tl.arange(0, TILE)
    inside = places < vocab
    x = tl.load(scores + row * stride + places, mask=inside, other=float("-inf"))
    top, first = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    below = x - tl.maximum(top, _LOWEST)
    tl.store(tops + out, top)
    # With NaN the place may be out of range
    tl.store(firsts + out, tl.minimum(tile * TILE + first, vocab - 1))
    tl.store(sums + out, tl.sum(tl.exp(below), 0))
    tl.store(broken + out, tl.max((inside & ~(tl.abs(x) < float("inf"))).to(tl.int32), 0))
    if SAMPLED:
        heat = tl.maximum(tl.load(temperature + row), _SMALLEST_NORMAL)
        tl.store(tempered + out, tl.sum(tl.exp(below * (1.0 / heat)), 0))
        largest = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), 1)
        tl.store(groups + out * (TILE // GROUP) + tl.arange(0, TILE // GROUP), largest)


@triton.jit
def settle(
    tops, firsts, tempered, raw_tops, raw_sums, broken, groups, temperature, min_p, top_k, top_p, vocab, tiles,
    tokens, states, normalizers, peaks, cuts, found,
    TILES: tl.constexpr, GROUPS: tl.constexpr, PER_TILE: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Find a row's most likely token, state and log-sum-exp, and the largest key that may be sampled."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    parts = row * tiles + tile
    raw = tl.load(raw_tops + parts, mask=inside, other=float("-inf"))
    raw_peak = tl.maximum(tl.max(raw, 0), _LOWEST)
    raw_sum = tl.sum(tl.load(raw_sums + parts, mask=inside, other=0.0) * tl.exp(raw - raw_peak), 0)
    tl.store(normalizers + row, raw_peak + tl.log(raw_sum))
    top = tl.load(tops + parts, mask=inside, other=float("-inf"))
    peak, best = tl.max(top, 0, return_indices=True, return_indices_tie_break_left=True)
    best = tl.minimum(best, tiles - 1)
    tl.store(tokens + row, tl.load(firsts + row * tiles + best).to(tl.int64))
    state = tl.where(peak == float("-inf"), STUCK, FINE)
    state = tl.where(tl.max(tl.load(broken + parts, mask=inside, other=0), 0) > 0, NOT_FINITE, state)
    tl.store(states + row, state)
    if SAMPLED:
        tl.store(peaks + row, peak)
        tl.store(found + row, 0)
        heat = tl.load(temperature + row)
        k = tl.load(top_k + row)
        p = tl.load(top_p + row)
        cut = tl.full([], _NO_WEIGHT, tl.int32)
        if (state == FINE) & (heat >= _SMALLEST_NORMAL) & ((k < vocab) | (p < 1)):
            share = tl.exp(_below(top, peak, heat))
            total = tl.sum(tl.load(tempered + parts, mask=inside, other=0.0) * share, 0)
            group = tl.arange(0, GROUPS)
            count = tiles * PER_TILE
            largest = tl.load(groups + row * count + group, mask=group < count, other=float("-inf"))
            # Min-p is ignored: after it top-p keeps at most the same tokens
            keys = tl.abs(_below(largest, peak, heat)).to(tl.int32, bitcast=True)
            by_count = k < vocab
            worth = tl.where(by_count, 1.0, tl.exp(-keys.to(tl.float32, bitcast=True)))
            # fp32 sums may be wrong by some millionths
            needed = tl.where(by_count, k.to(tl.float32), p * total * 1.001)
            low = tl.full([], 0, tl.int32)
            while low < cut:
                middle = low + (cut - low) // 2
                enough = tl.sum(tl.where(keys <= middle, worth, 0.0), 0) >= needed
                cut = tl.where(enough, middle, cut)
                low = tl.where(enough, low, middle + 1)
            if k >= vocab:
                # All less likely tokens together have less probability than top-p removes
                tail = -tl.log((1 - p) * total / vocab * 0.5)
                cut = tl.minimum(cut, tail.to(tl.int32, bitcast=True))
        tl.store(cuts + row, cut)


@triton.jit
def collect(
    scores, stride, vocab, temperature, min_p, top_k, top_p, states, peaks, cuts, found, masses, keys_found, ids_found,
    TILE: tl.constexpr, MAX_FOUND: tl.constexpr,
):  # fmt: skip
    """Compute a tile's weight. With top-k or top-p also collect the tokens that may be sampled, in any order."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    heat = tl.load(temperature + row)
    if (tl.load(states + row) == FINE) & (heat >= _SMALLEST_NORMAL):
        places = tile * TILE + tl.arange(0, TILE)
        x = tl.load(scores + row * stride + places, mask=places < vocab, other=float("-inf"))
        keys = _keys(x, tl.load(peaks + row), heat, tl.load(min_p + row))
        tl.store(masses + row * tl.num_programs(1) + tile, tl.sum(_weights(keys), 0))
        if (tl.load(top_k + row) < vocab) | (tl.load(top_p + row) < 1):
            kept = keys <= tl.load(cuts + row)
            order = tl.cumsum(kept.to(tl.int32), 0)
            start = tl.atomic_add(found + row, tl.max(order, 0), sem="relaxed")
            target = start + order - 1
            fits = kept & (target < MAX_FOUND)
            tl.store(keys_found + row * MAX_FOUND + target, keys, mask=fits)
            tl.store(ids_found + row * MAX_FOUND + target, places, mask=fits)


@triton.jit
def _up_to(key, keys, scores, vocab, peak, heat, min_p, TILE: tl.constexpr):
    """Count the tokens with keys up to ``key``, among ``keys`` or, if that is None, in the whole row.

    Returns:
        Their number and weight, both int64; their largest key; and the smallest key of the other tokens.
    """
    if keys is not None:
        inside = keys <= key
        count = tl.sum(inside.to(tl.int64), 0)
        mass = tl.sum(tl.where(inside, _weights(keys), 0), 0)
        last = tl.max(tl.where(inside, keys, 0), 0)
        following = tl.min(tl.where(inside, _IMPOSSIBLE, keys), 0)
    else:
        counts = tl.zeros([TILE], tl.int64)
        masses = tl.zeros([TILE], tl.int64)
        largest = tl.zeros([TILE], tl.int32)
        smallest = tl.full([TILE], _IMPOSSIBLE, tl.int32)
        for start in range(0, vocab, TILE):
            places = start + tl.arange(0, TILE)
            x = tl.load(scores + places, mask=places < vocab, other=float("-inf"))
            row_keys = _keys(x, peak, heat, min_p)
            inside = row_keys <= key
            counts += inside.to(tl.int64)
            masses += tl.where(inside, _weights(row_keys), 0)
            largest = tl.maximum(largest, tl.where(inside, row_keys, 0))
            smallest = tl.minimum(smallest, tl.where(inside, _IMPOSSIBLE, row_keys))
        count = tl.sum(counts, 0)
        mass = tl.sum(masses, 0)
        last = tl.max(largest, 0)
        following = tl.min(smallest, 0)
    return count, mass, last, following


@triton.jit
def _reach(target, BY_COUNT: tl.constexpr, keys, scores, vocab, peak, heat, min_p, TILE: tl.constexpr):
    """The smallest key up to which the number or the weight of tokens reaches ``target``, by bisection.

    The bounds are always existing keys, so the number of steps is about the number of bits of the count of keys.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.full([], _IMPOSSIBLE, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        count, mass, last, following = _up_to(middle, keys, scores, vocab, peak, heat, min_p, TILE)
        reached = (count if BY_COUNT else mass) >= target
        high = tl.where(reached, last, high)
        low = tl.where(reached, low, following)
    return high


@triton.jit
def _draw_ranked(u, k, p, whole, keys, scores, vocab, peak, heat, min_p, TILE: tl.constexpr):
    """Sample by rank. Returns the token's key, and its place by id among the tokens with this key."""
    if k < vocab:
        last = _reach(k, True, keys, scores, vocab, peak, heat, min_p, TILE)
        count, mass, _, _ = _up_to(last - 1, keys, scores, vocab, peak, heat, min_p, TILE)
        whole = mass + (k - count) * _weights(last)
    kept = whole
    if p < 1:
        limit = tl.ceil(p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64)
        last = _reach(limit, False, keys, scores, vocab, peak, heat, min_p, TILE)
        count, mass, _, _ = _up_to(last - 1, keys, scores, vocab, peak, heat, min_p, TILE)
        weight = tl.maximum(_weights(last), 1)
        # The nucleus includes the token at which the sum reaches the limit, and so always the first token
        kept = tl.minimum(mass + (limit - mass + weight - 1) // weight * weight, whole)
    drawn = tl.minimum((u * kept.to(tl.float64)).to(tl.int64), kept - 1)
    key = _reach(drawn + 1, False, keys, scores, vocab, peak, heat, min_p, TILE)
    count, mass, _, _ = _up_to(key - 1, keys, scores, vocab, peak, heat, min_p, TILE)
    return key, (drawn - mass) // tl.maximum(_weights(key), 1)


@triton.jit
def _draw_found(u, k, p, whole, count, keys_found, ids_found, vocab, MAX_FOUND: tl.constexpr):
    """Sample from ``count`` collected tokens, all in registers."""
    place = tl.arange(0, MAX_FOUND)
    keys = tl.load(keys_found + place, mask=place < count, other=_IMPOSSIBLE)
    key, rank = _draw_ranked(u, k, p, whole, keys, None, vocab, 0.0, 0.0, 0.0, MAX_FOUND)
    ids = tl.load(ids_found + place, mask=place < count, other=_IMPOSSIBLE)
    ids = tl.where(keys == key, ids, _IMPOSSIBLE)
    return _reach(rank + 1, True, ids, None, vocab, 0.0, 0.0, 0.0, MAX_FOUND)


@triton.jit
def _draw_from_row(u, k, p, whole, scores, vocab, peak, heat, min_p, TILE: tl.constexpr):
    """Sample from the whole row, which is read again in every step."""
    key, rank = _draw_ranked(u, k, p, whole, None, scores, vocab, peak, heat, min_p, TILE)
    token = 0
    seen = 0
    for start in range(0, vocab, TILE):
        places = start + tl.arange(0, TILE)
        x = tl.load(scores + places, mask=places < vocab, other=float("-inf"))
        equal = (_keys(x, peak, heat, min_p) == key).to(tl.int32)
        here = tl.sum(equal, 0)
        inside = (seen <= rank) & (rank < seen + here)
        passed = tl.sum((tl.cumsum(equal, 0) <= rank - seen).to(tl.int32), 0)
        token = tl.where(inside, start + passed, token)
        seen += here
    return token


@triton.jit
def draw(
    scores, stride, vocab, temperature, min_p, top_k, top_p, uniform, states, peaks, found, masses, tiles,
    keys_found, ids_found, tokens,
    TILE: tl.constexpr, TILES: tl.constexpr, FEW: tl.constexpr, MAX_FOUND: tl.constexpr,
):  # fmt: skip
    """Invert a row's cumulative distribution at ``uniform``, by rank with top-k or top-p and by id otherwise."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (tl.load(states + row) == FINE) & (heat >= _SMALLEST_NORMAL):
        u = tl.load(uniform + row)
        k = tl.load(top_k + row).to(tl.int64)
        p = tl.load(top_p + row)
        floor = tl.load(min_p + row)
        peak = tl.load(peaks + row)
        tile = tl.arange(0, TILES)
        parts = tl.load(masses + row * tiles + tile, mask=tile < tiles, other=0)
        whole = tl.sum(parts, 0)
        scores += row * stride
        if (k >= vocab) & (p >= 1):
            drawn = tl.minimum((u * whole.to(tl.float64)).to(tl.int64), whole - 1)
            before = tl.cumsum(parts, 0) <= drawn
            start = tl.sum(before.to(tl.int32), 0) * TILE
            places = start + tl.arange(0, TILE)
            x = tl.load(scores + places, mask=places < vocab, other=float("-inf"))
            weights = _weights(_keys(x, peak, heat, floor))
            passed = tl.cumsum(weights, 0) <= drawn - tl.sum(tl.where(before, parts, 0), 0)
            token = start + tl.sum(passed.to(tl.int32), 0)
        else:
            count = tl.load(found + row)
            keys_found += row * MAX_FOUND
            ids_found += row * MAX_FOUND
            if count <= FEW:
                token = _draw_found(u, k, p, whole, count, keys_found, ids_found, vocab, FEW)
            elif count <= MAX_FOUND:
                token = _draw_found(u, k, p, whole, count, keys_found, ids_found, vocab, MAX_FOUND)
            else:
                token = _draw_from_row(u, k, p, whole, scores, vocab, peak, heat, floor, TILE)
        tl.store(tokens + row, tl.minimum(token, vocab - 1).to(tl.int64))


@triton.jit
def finish(logits, stride, states, normalizers, tokens, logprobs):
    """Write the token's log probability under the raw logits. A row without a token gets its negative state instead."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    state = tl.load(states + row)
    tl.store(logprobs + row, tl.load(logits + row * stride + token) - tl.load(normalizers + row))
    tl.store(tokens + row, tl.where(state == FINE, token, -state.to(tl.int64)))
