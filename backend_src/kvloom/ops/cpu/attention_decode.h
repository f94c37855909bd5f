// Attention of a decode's few rows over a tile of keys and values, which are read in place.
//
// Packing a tile, as chunks do, would cost more than multiplying it by so few rows. Here each key is multiplied in
// place, the sums of LANES keys are folded into one vector, and the next data is prefetched meanwhile. This is only for
// pairs of bf16 numbers.
#pragma once
#include "attention_tile.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int FOLD = 4;           // keys to fold at once
constexpr int SOFTMAX_STEPS = 2;  // a softmax takes about as long as this many steps of scores

// Adds pairs of blocks of SIZE lanes in a and in b, and returns the sums side by side.
template <int SIZE>
static inline floats fold(floats a, floats b) {
    typedef int32_t lanes __attribute__((vector_size(4 * LANES)));
    lanes kept, moved;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) {
        kept[l] = l & SIZE ? LANES + l : l;
        moved[l] = l & SIZE ? LANES + l - SIZE : l + SIZE;
    }
    return __builtin_shuffle(a, b, kept) + __builtin_shuffle(a, b, moved);
}

// The 2 * LANES numbers of a row from `column` on, with zeros after its end.
template <int D>
static inline words read_row(const bf16* row, int column) {
    if (column + 2 * LANES <= D) return Pair::read(row + column);
    static_assert(D % LANES == 0);
    return (words)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(row + column)));
}

// The products of R rows of queries [R][D] and a key, not yet summed.
template <int R, int D>
static inline void multiply(const bf16* queries, const bf16* key, floats* sums) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[r] = floats{};
#pragma GCC unroll 16
    for (int i = 0; i < D; i += 2 * LANES) {
        const words k = read_row<D>(key, i);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = Pair::multiply_add(read_row<D>(queries + r * D, i), k, sums[r]);
    }
}

// Scores [R][TILE] of R rows of queries and the LANES keys at `places`.
template <int R, int D>
static inline void score_keys(const bf16* queries, const bf16* keys, const int64_t* places, float* scores) {
    floats quads[FOLD][R];
#pragma GCC unroll 16
    for (int i = 0; i < FOLD; i++) {
        floats a[R], b[R], c[R], d[R];
        multiply<R, D>(queries, keys + places[FOLD * i], a);
        multiply<R, D>(queries, keys + places[FOLD * i + 1], b);
        multiply<R, D>(queries, keys + places[FOLD * i + 2], c);
        multiply<R, D>(queries, keys + places[FOLD * i + 3], d);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) quads[i][r] = fold<2>(fold<1>(a[r], b[r]), fold<1>(c[r], d[r]));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        store(scores + r * TILE,
              fold<8>(fold<4>(quads[0][r], quads[1][r]), fold<4>(quads[2][r], quads[3][r])));
}

// Some heads of a tile's keys or values, side by side in their blocks.
struct Heads {
    const bf16* cache;
    const Places* places;
    int64_t stride;
};

// Prefetches data that is needed later, in the order of memory and a little at a time, so that nothing waits for it.
template <int D>
class Ahead {
    const Heads heads_;
    const int step_;  // rows to prefetch per call
    int first_ = 0, head_ = 0, row_ = 0;

public:
    // The number of calls that prefetch everything.
    Ahead(const Heads& heads, int calls)
        : heads_(heads), step_((heads.places->n * heads.places->heads + calls - 1) / std::max(calls, 1)) {}

    void advance() {
        const Places& places = *heads_.places;
        for (int i = 0; i < step_ && first_ < places.n; i++) {
            const bf16* row = heads_.cache + head_ * heads_.stride + places.at[first_ + row_];
            for (int c = 0; c < D; c += 32) __builtin_prefetch(row + c, 0, 2);
            if (++row_ < std::min(LANES, places.n - first_)) continue;
            row_ = 0;
            if (++head_ < heads_.places->heads) continue;
            head_ = 0;
            first_ += LANES;
        }
    }
};

// Adds weights [R][TILE] times the values at `places` to R rows of sums [R][D], for the C vectors from `column` on.
template <int R, int C, int D>
static inline void mix_values(const bf16* weights, const bf16* values, const Places& places, int column, float* sums,
                              Ahead<D>& ahead) {
    const uint32_t* pairs = (const uint32_t*)weights;
    floats x[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) x[r][i] = load(sums + r * D + column + i * LANES);
    for (int j = 0; j < places.n; j += 2) {
        if (j % LANES == 0) ahead.advance();
        alignas(64) uint32_t v[C * LANES];
        Pair::interleave<C * LANES>(values + places.at[j] + column, values + places.at[j + 1] + column, v);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const words weight = words{} + pairs[r * (TILE / 2) + j / 2];
#pragma GCC unroll 16
            for (int i = 0; i < C; i++) x[r][i] = Pair::multiply_add(weight, load(v + i * LANES), x[r][i]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int i = 0; i < C; i++) store(sums + r * D + column + i * LANES, x[r][i]);
}

// Scores and softmax weights [R][TILE] of R rows of queries and a head of keys.
template <int R, int D>
static inline void weigh_head(const bf16* queries, const bf16* keys, const Places& places, float scale,
                              const State& state, bf16* weights, Ahead<D>& ahead) {
    alignas(64) float scores[R * TILE], shrink[LANES];
    for (int first = 0; first < places.n; first += LANES) {
        ahead.advance();
        score_keys<R, D>(queries, keys, places.at + first, scores + first);
    }
    for (int i = 0; i < SOFTMAX_STEPS; i++) ahead.advance();
    int seen[R];
    std::fill_n(seen, R, places.n);
    softmax_rows<Pair, R>(scores, seen, scale, state, weights, shrink);
    for (int i = 0; i < R * D; i += LANES) store(state.sums + i, load(state.sums + i) * shrink[i / D]);
}

// Handles as many columns at once as fit into registers.
template <int R, int D>
static inline void mix_head(const bf16* weights, const bf16* values, const Places& places, float* sums,
                            Ahead<D>& ahead) {
    constexpr int V = D / LANES, C = std::min(V, R < 4 ? 8 : 4);
    for (int i = 0; i + C <= V; i += C) mix_values<R, C, D>(weights, values, places, i * LANES, sums, ahead);
    if constexpr (V % C) mix_values<R, V % C, D>(weights, values, places, (V - V % C) * LANES, sums, ahead);
}

// Calls a function of R for the rows of a group, up to four at a time.
template <typename F>
static inline void in_fours(int rows, F function) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) function(std::integral_constant<int, 4>(), r);
    if (r + 3 == rows) function(std::integral_constant<int, 3>(), r);
    if (r + 2 == rows) function(std::integral_constant<int, 2>(), r);
    if (r + 1 == rows) function(std::integral_constant<int, 1>(), r);
}

// Attention of queries [heads][group][D] over the same heads of keys and values. Every row attends to all of them.
// `next` is the data to prefetch. `weights` has room for [heads][group][TILE].
template <int D>
void attend_decode(int group, const bf16* queries, const Heads& keys, const bf16* values, const Heads& next,
                     float scale, const State& state, bf16* weights) {
    const Places& places = *keys.places;
    const int chunks = (group + 3) / 4 * places.heads, steps = (places.n + LANES - 1) / LANES;
    Ahead<D> soon(Heads{values, &places, keys.stride}, chunks * (steps + SOFTMAX_STEPS));
    for (int h = 0; h < places.heads; h++)
        in_fours(group, [&](auto count, int r) {
            r += h * group;
            weigh_head<count, D>(queries + r * D, keys.cache + h * keys.stride, places, scale,
                                 state.from<D>(r), weights + r * TILE, soon);
        });
    Ahead<D> later(next, chunks * steps);
    for (int h = 0; h < places.heads; h++)
        in_fours(group, [&](auto count, int r) {
            r += h * group;
            mix_head<count, D>(weights + r * TILE, values + h * keys.stride, places, state.sums + r * D, later);
        });
}

}  // namespace
#endif
