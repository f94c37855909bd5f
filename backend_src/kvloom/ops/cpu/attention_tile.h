// A tile of keys and values against rows of queries: packing, scores, softmax, weighted sums.
//
// Everything that is multiplied is a 32-bit word: an fp32 number, or a pair of bf16 numbers where the machine
// multiplies these in pairs. What a row gets depends on no other row.
#pragma once
#include <algorithm>
#include <cmath>
#include <immintrin.h>
#include <limits>
#include <type_traits>

#include "common.h"

namespace {

constexpr int TILE = 8 * LANES;   // keys whose softmax is taken together
constexpr int GROUP = 2 * LANES;  // keys that are scored together
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// 2^x for x <= 127, p being its polynomial on [-0.5, 0.5]; below 2^-126 it is that.
template <typename P>
static inline floats power_of_2(floats x, P polynomial) {
    x = x < -126.0f ? floats{} - 126.0f : x;
    const floats magic = floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const floats shifted = x + magic;
    return (floats)((words)polynomial(x - (shifted - magic)) + ((words)shifted << 23));
}

struct Single {
    static constexpr int SIZE = 1;
    typedef float number;
    // to 1 ulp or so (Cephes' exp2f)
    static inline floats exp2(floats x) {
        return power_of_2(x, [](floats f) {
            floats p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
            p = p * f + 9.618437357674640e-3f;
            p = p * f + 5.550332471162809e-2f;
            p = p * f + 2.402264791363012e-1f;
            p = p * f + 6.931472028550421e-1f;
            return p * f + 1.0f;
        });
    }
    static inline floats multiply_add(words a, words b, floats sum) { return (floats)a * (floats)b + sum; }
    template <typename T>
    static inline words read(const T* p) {
        return (words)load(p);
    }
};

#if defined(__AVX512BF16__)
struct Pair {
    static constexpr int SIZE = 2;
    typedef bf16 number;
    // to 3e-6, a thousandth of what rounding the result to bf16 costs
    static inline floats exp2(floats x) {
        return power_of_2(x, [](floats f) {
            floats p = f * 9.58285e-3f + 5.590642e-2f;
            p = p * f + 2.4024099e-1f;
            p = p * f + 6.9312419e-1f;
            return p * f + 1.0f;
        });
    }
    static inline floats multiply_add(words a, words b, floats sum) {
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    static inline words read(const bf16* p) {
        words x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    // Pairs of the numbers of two rows.
    template <int D>
    static inline void interleave(const bf16* a, const bf16* b, uint32_t* pairs) {
        typedef uint16_t numbers __attribute__((vector_size(4 * LANES)));
        const words index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const words lower = index * 0x00010001 + 0x00200000, upper = lower + 0x00100010;
        int i = 0;
        for (; i + 2 * LANES <= D; i += 2 * LANES) {
            const numbers x = (numbers)read(a + i), y = (numbers)read(b + i);
            store(pairs + i, (words)__builtin_shuffle(x, y, (numbers)lower));
            store(pairs + i + LANES, (words)__builtin_shuffle(x, y, (numbers)upper));
        }
        // a bf16 is the upper half of the fp32 that it is read as
        if constexpr (D % (2 * LANES)) store(pairs + i, (words)load(a + i) >> 16 | (words)load(b + i));
    }
};
#endif

// The words of a head of D numbers.
template <typename M, int D>
constexpr int WORDS = D / M::SIZE;

// Where the n keys (and values) of a tile begin, in numbers from the start of the cache; of so many heads the first.
struct Places {
    int n, heads;
    int64_t at[TILE];
};

// Asks for the rows of LANES places from `first` on before they are needed, into the L2 cache.
template <int D, typename T>
static inline void fetch(const T* cache, const Places& places, int first) {
    for (int j = first; j < std::min(places.n, first + LANES); j++)
        for (int i = 0; i < D; i += 64 / (int)sizeof(T)) __builtin_prefetch(cache + places.at[j] + i, 0, 2);
}

// LANES keys from `first` on, in the WIDTH words from `column` on, turned.
template <typename M, int WIDTH, typename T>
static inline void pack_block(const T* cache, const Places& places, int first, int column, uint32_t* packed) {
    floats rows[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        rows[j] = floats{};
        if (first + j >= places.n) continue;
        const T* row = cache + places.at[first + j] + column * M::SIZE;
        if constexpr (WIDTH == LANES)
            rows[j] = (floats)M::read(row);
        else
            std::memcpy(&rows[j], row, 4 * WIDTH);
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) store(packed + i * GROUP, (words)rows[i]);
}

// Keys as [groups][WORDS][GROUP], so that a query's scores of neighbouring keys are neighbours; zeros past the end.
template <typename M, int D, typename T>
void pack_keys(const T* cache, const Places& places, const Places& next, uint32_t* packed) {
    constexpr int W = WORDS<M, D>;
    for (int first = 0; first < (places.n + GROUP - 1) / GROUP * GROUP; first += LANES) {
        fetch<D>(cache, next, first);
        uint32_t* out = packed + first / GROUP * W * GROUP + first % GROUP;
        int column = 0;
        for (; column + LANES <= W; column += LANES)
            pack_block<M, LANES>(cache, places, first, column, out + column * GROUP);
        if constexpr (W % LANES) pack_block<M, W % LANES>(cache, places, first, column, out + column * GROUP);
    }
}

// Values as [keys / SIZE][D], the keys of a pair side by side; zeros past the end.
template <typename M, int D, typename T>
void pack_values(const T* cache, const Places& places, const Places& next, uint32_t* packed) {
    for (int j = 0; j < places.n; j += M::SIZE, packed += D) {
        if (j % LANES == 0) fetch<D>(cache, next, j);
        const T* row = cache + places.at[j];
        if constexpr (M::SIZE == 1)
            for (int i = 0; i < D; i += LANES) store(packed + i, (words)load(row + i));
        else if (j + 1 < places.n)
            M::template interleave<D>(row, cache + places.at[j + 1], packed);
        else
            for (int i = 0; i < D; i += LANES) store(packed + i, (words)load(row + i) >> 16);
    }
}

// Scores of R rows of queries [R][WORDS] against a group of keys.
template <typename M, int R, int D>
void score(const uint32_t* queries, const uint32_t* keys, float* scores) {
    constexpr int W = WORDS<M, D>;
    floats low[R] = {}, high[R] = {};
    for (int i = 0; i < W; i++) {
        const words a = load(keys + i * GROUP), b = load(keys + i * GROUP + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const words q = words{} + queries[r * W + i];
            low[r] = M::multiply_add(q, a, low[r]);
            high[r] = M::multiply_add(q, b, high[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        store(scores + r * TILE, low[r]);
        store(scores + r * TILE + LANES, high[r]);
    }
}

// R rows of sums [R][D] += weights [R][TILE / SIZE] times packed values of n keys, in the C vectors from `column` on.
template <typename M, int R, int C, int D>
void mix(const uint32_t* weights, const uint32_t* values, int n, int column, float* sums) {
    floats x[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) x[r][i] = load(sums + r * D + column + i * LANES);
    for (int j = 0; j < (n + M::SIZE - 1) / M::SIZE; j++) {
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) {
            const words v = load(values + j * D + column + i * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                x[r][i] = M::multiply_add(words{} + weights[r * (TILE / M::SIZE) + j], v, x[r][i]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) store(sums + r * D + column + i * LANES, x[r][i]);
}

// The same in all columns, as many at once as there are registers for.
template <typename M, int R, int D>
void mix_all(const uint32_t* weights, const uint32_t* values, int n, float* sums) {
    constexpr int V = D / LANES, MOST = LANES == 16 ? 4 : 2;
    constexpr int C = std::min(V, MOST);
    for (int i = 0; i + C <= V; i += C) mix<M, R, C, D>(weights, values, n, i * LANES, sums);
    if constexpr (V % C) mix<M, R, V % C, D>(weights, values, n, (V - V % C) * LANES, sums);
}

// The online softmax of some rows: sums of values [rows][D], weighted by 2^(score - largest), and of the weights;
// scores are logarithms to base 2.
struct State {
    float *sums, *largest, *totals;

    template <int D>
    State from(int row) const {
        return {sums + row * D, largest + row, totals + row};
    }
    template <int D>
    void clear(int rows) const {
        std::fill(sums, sums + rows * D, 0.0f);
        std::fill(largest, largest + rows, NOTHING);
        std::fill(totals, totals + rows, 0.0f);
    }
};

template <int D>
void scale_row(float* row, float factor) {
    for (int i = 0; i < D; i += LANES) store(row + i, load(row + i) * factor);
}

// R rows of scores [R][TILE] to weights 2^(score * scale - largest), as numbers of M: those of `seen[r]` keys (null: of
// n), zeros up to n and to a multiple of LANES. Some rows at once, so that none waits for its own last result.
template <typename M, int R, int D>
static inline void softmax_rows(float* scores, const int* seen, int n, float scale, const State& state,
                                typename M::number* weights) {
    const int end = (n + LANES - 1) / LANES * LANES;
    for (int r = 0; r < R; r++)
        for (int j = seen ? seen[r] : n; j < end; j++) scores[r * TILE + j] = NOTHING;
    floats peaks[R], totals[R] = {};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) peaks[r] = load(scores + r * TILE);
    for (int j = LANES; j < end; j += LANES)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const floats s = load(scores + r * TILE + j);
            peaks[r] = s > peaks[r] ? s : peaks[r];
        }
    static_assert(R <= LANES);
    floats old = {}, now = {};
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        old[r] = state.largest[r];
        now[r] = std::max(old[r], max_of(peaks[r]) * scale);
    }
    const floats shrink = M::exp2(old - now);  // 2^-126 at the first tile: of nothing
    for (int j = 0; j < end; j += LANES)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const floats weight = M::exp2(load(scores + r * TILE + j) * scale - now[r]);
            totals[r] += weight;  // of keys that are not seen next to nothing: 2^-126
            store(weights + r * TILE + j, weight);
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        for (int j = seen ? seen[r] : n; j < end; j++) narrow(weights + r * TILE + j, 0.0f);
        state.totals[r] = state.totals[r] * shrink[r] + sum_of(totals[r]);
        if (now[r] > old[r]) scale_row<D>(state.sums + r * D, shrink[r]);
        state.largest[r] = now[r];
    }
}

// What a task holds beside its state: its queries, a packed tile, and how many of the tile's keys each row sees; if it
// is a decode, only the weights of a tile.
struct Buffers {
    uint32_t *weights, *queries, *keys, *values;
    int* seen;
};

// R rows of queries against a packed tile whose first key is at `first`; row i sees keys up to `seen[i]`.
template <typename M, int R, int D>
void attend_rows(const uint32_t* queries, const uint32_t* keys, const uint32_t* values, const int* seen, float scale,
                 const State& state) {
    alignas(64) float scores[R * TILE];
    alignas(64) typename M::number weights[R * TILE];
    const int n = seen[R - 1];
    for (int group = 0; group * GROUP < n; group++)
        score<M, R, D>(queries, keys + group * WORDS<M, D> * GROUP, scores + group * GROUP);
    constexpr int ROWS = R % 4 == 0 ? 4 : R % 3 == 0 ? 3 : R;
    for (int r = 0; r < R; r += ROWS)
        softmax_rows<M, ROWS, D>(scores + r * TILE, seen + r, n, scale, state.from<D>(r), weights + r * TILE);
    const uint32_t* words_of = (const uint32_t*)weights;
    if constexpr (R > 6) {
        mix_all<M, R / 2, D>(words_of, values, n, state.sums);
        mix_all<M, R / 2, D>(words_of + R / 2 * (TILE / M::SIZE), values, n, state.sums + R / 2 * D);
    } else {
        mix_all<M, R, D>(words_of, values, n, state.sums);
    }
}

// The rows of `state` from `row` on, in groups that fill the registers.
template <typename M, int D>
void attend_tile(int row, int rows, const uint32_t* queries, const uint32_t* keys, const uint32_t* values,
                 const int* seen, float scale, const State& state) {
#define ADVANCE(R)                                                                                                   \
    attend_rows<M, R, D>(queries + row * WORDS<M, D>, keys, values, seen + row, scale, state.from<D>(row)), row += R
    if constexpr (LANES == 16)
        while (row + 12 <= rows) ADVANCE(12);
    while (row + 6 <= rows) ADVANCE(6);
    if (row + 3 <= rows) ADVANCE(3);
    if (row + 2 <= rows) ADVANCE(2);
    if (row < rows) ADVANCE(1);
#undef ADVANCE
}

// Joins what two runs of keys gave: 2^(x - a) of one and 2^(x - b) of the other become 2^(x - max(a, b)).
template <int D>
void merge(int rows, const State& more, const State& state) {
    for (int r = 0; r < rows; r++) {
        // of no keys at all; scores that are not numbers have no largest either, but a total that is none
        if (more.totals[r] == 0) continue;
        const float largest = std::max(state.largest[r], more.largest[r]);
        const float old_scale = std::exp2(state.largest[r] - largest), scale = std::exp2(more.largest[r] - largest);
        float* sums = state.sums + r * D;
        for (int i = 0; i < D; i += LANES)
            store(sums + i, load(sums + i) * old_scale + load(more.sums + r * D + i) * scale);
        state.totals[r] = state.totals[r] * old_scale + more.totals[r] * scale;
        state.largest[r] = largest;
    }
}

}  // namespace
