// Attention of rows of queries over a tile of keys and values: packing, scores, softmax and weighted sums.
//
// All factors are 32-bit words: an fp32 number, or a pair of bf16 numbers if the CPU multiplies those in pairs. A row's
// result does not depend on other rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <immintrin.h>
#include <limits>
#include <type_traits>

#include "common.h"

namespace {

constexpr int TILE = 8 * LANES;   // keys per softmax
constexpr int GROUP = 2 * LANES;  // keys per group of scores
#if LANES_512
constexpr words LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr words LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Single {
    static constexpr int SIZE = 1;
    typedef float number;
    // 2^x for x <= 127, to about 1 ulp (as Cephes' exp2f); 0 below 2^-126
    static inline floats exp2(floats x) {
        const floats magic = floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
        const floats shifted = x + magic, f = x - (shifted - magic);
        floats p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
        p = p * f + 9.618437357674640e-3f;
        p = p * f + 5.550332471162809e-2f;
        p = p * f + 2.402264791363012e-1f;
        p = p * f + 6.931472028550421e-1f;
        p = p * f + 1.0f;
        return x < -126.0f ? floats{} : (floats)((words)p + ((words)shifted << 23));
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
    static inline floats exp2(floats x) { return rough_exp2(x); }
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
        const words lower = LANE * 0x00010001 + 0x00200000, upper = lower + 0x00100010;
        int i = 0;
        for (; i + 2 * LANES <= D; i += 2 * LANES) {
            const numbers x = (numbers)read(a + i), y = (numbers)read(b + i);
            store(pairs + i, (words)__builtin_shuffle(x, y, (numbers)lower));
            store(pairs + i + LANES, (words)__builtin_shuffle(x, y, (numbers)upper));
        }
        // a bf16 is the upper half of an fp32
        if constexpr (D % (2 * LANES)) store(pairs + i, (words)load(a + i) >> 16 | (words)load(b + i));
    }
};
#endif

// The number of words in a head of D numbers.
template <typename M, int D>
constexpr int WORDS = D / M::SIZE;

// Where the n keys and values of a tile begin, in numbers from the start of the cache, for the first of some heads.
struct Places {
    int n, heads;
    int64_t at[TILE];
};

// Prefetches the rows of LANES places from `first` on into the L2 cache.
template <int D, typename T>
static inline void fetch(const T* cache, const Places& places, int first) {
    for (int j = first; j < std::min(places.n, first + LANES); j++)
        for (int i = 0; i < D; i += 64 / (int)sizeof(T)) __builtin_prefetch(cache + places.at[j] + i, 0, 2);
}

// LANES keys from `first` on, transposed, in the WIDTH words from `column` on.
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

// Keys as [groups][WORDS][GROUP], so that a query's scores of neighbouring keys are neighbours. Padded with zeros.
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

// Values as [keys / SIZE][D], with the keys of a pair side by side. Padded with zeros.
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

// Scores of R rows of queries [R][WORDS] and V vectors of a group of keys.
template <typename M, int R, int V, int D>
static inline void score(const uint32_t* queries, const uint32_t* keys, float* scores) {
    constexpr int W = WORDS<M, D>;
    floats sums[R][V] = {};
    for (int i = 0; i < W; i++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int v = 0; v < V; v++)
                sums[r][v] = M::multiply_add(words{} + queries[r * W + i], load(keys + i * GROUP + v * LANES),
                                             sums[r][v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) store(scores + r * TILE + v * LANES, sums[r][v]);
}

// Multiplies R rows of sums [R][D] by `shrink` and adds weights [R][TILE / SIZE] times packed values of n keys, for the
// C vectors from `column` on.
template <typename M, int R, int C, int D>
void mix(const uint32_t* weights, const uint32_t* values, int n, int column, const float* shrink, float* sums) {
    floats x[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) x[r][i] = load(sums + r * D + column + i * LANES) * shrink[r];
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

// The same for all columns, as many at once as fit into registers.
template <typename M, int R, int D>
void mix_all(const uint32_t* weights, const uint32_t* values, int n, const float* shrink, float* sums) {
    constexpr int V = D / LANES, MOST = LANES == 16 ? 4 : 2;
    constexpr int C = std::min(V, MOST);
    for (int i = 0; i + C <= V; i += C) mix<M, R, C, D>(weights, values, n, i * LANES, shrink, sums);
    if constexpr (V % C) mix<M, R, V % C, D>(weights, values, n, (V - V % C) * LANES, shrink, sums);
}

// The online softmax's state of some rows: the largest score, the sum of weights 2^(score - largest), and the weighted
// sums of values [rows][D]. Scores are logarithms to base 2.
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

// Turns R rows of scores [R][TILE] into weights 2^(score * scale - largest) of M's type. Row r has `seen[r]` keys, then
// zeros up to a multiple of LANES after `seen[R - 1]`, the largest. The caller must multiply the sums by `shrink`
// [LANES]. Not inlined, because its vectors would take registers from the products around it.
template <typename M, int R>
__attribute__((noinline)) void softmax_rows(float* scores, const int* seen, float scale, const State& state,
                                            typename M::number* weights, float* shrink) {
    static_assert(R <= LANES);
    const int end = (seen[R - 1] + LANES - 1) / LANES * LANES;
    alignas(64) float growth[LANES] = {};
    float totals[R];
    if (seen[0] < end)  // rows of neighbouring tokens differ in the last two vectors only
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int j = std::max(end - 2 * LANES, 0); j < end; j += LANES) {
                const words left = words{} + uint32_t(std::max(seen[r] - j, 0));
                float* s = scores + r * TILE + j;
                store(s, LANE < left ? load(s) : floats{} + NOTHING);
            }
    for (int r = 0; r < R; r++) {
        floats peaks = load(scores + r * TILE);
        for (int j = LANES; j < end; j += LANES) {
            const floats s = load(scores + r * TILE + j);
            peaks = s > peaks ? s : peaks;
        }
        const float largest = std::max(state.largest[r], max_of(peaks) * scale);
        growth[r] = largest - state.largest[r];
        state.largest[r] = largest;
    }
    store(shrink, M::exp2(-load(growth)));
    for (int r = 0; r < R; r++) {  // a loop of its own, so that no row waits for its largest score
        floats sums{};
        for (int j = 0; j < end; j += LANES) {
            const floats weight = M::exp2(load(scores + r * TILE + j) * scale - state.largest[r]);
            sums += weight;
            store(weights + r * TILE + j, weight);
        }
        totals[r] = sum_of(sums);
    }
    for (int r = 0; r < R; r++) state.totals[r] = state.totals[r] * shrink[r] + totals[r];
}

// A task's buffers: its queries, a packed tile, and the number of the tile's keys that each row attends to. A decode
// needs only the weights of a tile.
struct Buffers {
    uint32_t *weights, *queries, *keys, *values;
    int* seen;
};

// Attention of R rows of queries over a packed tile. Row i attends to the first `seen[i]` keys.
template <typename M, int R, int D>
void attend_rows(const uint32_t* queries, const uint32_t* keys, const uint32_t* values, const int* seen, float scale,
                 const State& state) {
    alignas(64) float scores[R * TILE], shrink[LANES];
    alignas(64) typename M::number weights[R * TILE];
    const int n = seen[R - 1];
    for (int first = 0; first < n; first += GROUP) {
        const uint32_t* group = keys + first * WORDS<M, D>;
        if (n - first > LANES)
            score<M, R, 2, D>(queries, group, scores + first);
        else
            score<M, R, 1, D>(queries, group, scores + first);
    }
    softmax_rows<M, R>(scores, seen, scale, state, weights, shrink);
    constexpr int S = R > 6 ? R / 2 : R;  // as many rows at once as fit into registers
    for (int r = 0; r < R; r += S)
        mix_all<M, S, D>((const uint32_t*)(weights + r * TILE), values, n, shrink + r, state.sums + r * D);
}

// Handles the rows of `state` from `row` on, in groups that fill the registers.
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

// Joins the states of two ranges of keys: 2^(x - a) of one and 2^(x - b) of the other become 2^(x - max(a, b)).
template <int D>
void merge(int rows, const State& more, const State& state) {
    for (int r = 0; r < rows; r++) {
        // A range without keys. With NaN scores there is no largest either, but the total is NaN
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
