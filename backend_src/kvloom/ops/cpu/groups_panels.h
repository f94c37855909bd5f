// Products with weights in groups in fp32, for CPUs with few registers. Both halves of a panel are computed together.
//
// Widening integers takes nearly as long there as multiplying them by two rows. With more rows, all rows of a pass
// share a group's widened numbers, which stay in the L1 cache. The order of a sum does not depend on the rows: the
// inputs of a group are added one by one, then the scaled total is added to the groups before, then (with 4 bits) the
// minimum times the sum of the inputs.
#pragma once
#include "groups.h"

namespace {

constexpr int MOST = 6;  // rows whose sums for both halves fit into registers
constexpr int FEW = 4;   // up to this many rows, weights are widened in registers instead of memory

struct Head {
    floats scale, minimum;
};

// Converts finite fp16 to fp32, with the CPU's instruction if it has one.
static inline floats widen_halves(const uint8_t* p) {
#if defined(__F16C__) && !LANES_512
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return load_halves(p);
#endif
}

template <int BITS>
static inline Head load_head(const uint8_t* p) {
    Head head = {widen_halves(p), {}};
    if constexpr (BITS == 4) head.minimum = widen_halves(p + 2 * LANES);
    return head;
}

template <int BITS>
static inline void add_group(floats& total, floats part, const Head& head, const float* sum) {
    total += part * head.scale;
    if constexpr (BITS == 4) total += head.minimum * *sum;
}

// A panel of a weight.
template <int BITS>
struct Panel {
    const uint8_t* packed;
    int64_t groups;

    const uint8_t* values(int half, int64_t g) const { return packed + values_at<BITS>(half, g, groups); }
    Head head(int half, int64_t g) const { return load_head<BITS>(packed + head_at<BITS>(half, g, groups)); }
};

template <typename O>
static inline void store_half(O* out, floats sums, int64_t width) {
    if (width <= 0) return;
    const floats one[1] = {sums};
    store_tile(out, 0, one, width);
}

// Adds the products of G groups from group g on. Groups are independent until they are added, so that more
// multiplications run in parallel than one row has.
template <int R, int G, int BITS>
static inline __attribute__((always_inline)) void add_groups(const Panel<BITS>& panel, int64_t g, const float* x,
                                                             const float* sums, floats (&totals)[2][R]) {
    floats parts[G][2][R] = {};
    for (int64_t first = 0; first < GROUP; first += WORD<BITS>) {
        words word[G][2];
#pragma GCC unroll 4
        for (int i = 0; i < G; i++)
            for (int half = 0; half < 2; half++)
                word[i][half] = load_words(panel.values(half, g + i) + first / WORD<BITS> * sizeof(words));
#pragma GCC unroll 8
        for (int64_t k = 0; k < WORD<BITS>; k++)
#pragma GCC unroll 4
            for (int i = 0; i < G; i++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const floats weights = value_of<BITS>(word[i][half], k);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++)
                        step(parts[i][half][r], x + (i * R + r) * GROUP + first + k, weights);
                }
    }
#pragma GCC unroll 4
    for (int i = 0; i < G; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Head head = panel.head(half, g + i);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) add_group<BITS>(totals[half][r], parts[i][half][r], head, sums + i * R + r);
        }
}

// A few rows times a panel.
template <int R, int BITS, typename O>
__attribute__((noinline)) void few_rows(const float* x, const float* sums, const Panel<BITS>& panel, Ahead ahead,
                                        O* out, int64_t outputs, int64_t width) {
    constexpr int TOGETHER = R <= 2 ? 2 : 1;
    floats totals[2][R] = {};
    int64_t g = 0;
    for (; g + TOGETHER <= panel.groups; g += TOGETHER) {
        for (int i = 0; i < TOGETHER; i++) ahead.fetch();
        add_groups<R, TOGETHER>(panel, g, x + g * R * GROUP, sums + g * R, totals);
    }
    for (; g < panel.groups; g++) {
        ahead.fetch();
        add_groups<R, 1>(panel, g, x + g * R * GROUP, sums + g * R, totals);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
            store_half(out + r * outputs + half * LANES, totals[half][r], width - half * LANES);
}

// The widened fp32 numbers of a panel's group, [GROUP][PANEL].
template <int BITS>
static inline void widen_group(const Panel<BITS>& panel, int64_t g, float* wide) {
    for (int half = 0; half < 2; half++)
        for (int64_t first = 0; first < GROUP; first += WORD<BITS>) {
            const words word = load_words(panel.values(half, g) + first / WORD<BITS> * sizeof(words));
#pragma GCC unroll 8
            for (int64_t k = 0; k < WORD<BITS>; k++)
                store(wide + (first + k) * PANEL + half * LANES, value_of<BITS>(word, k));
        }
}

// Adds R rows times a widened group to totals [R][PANEL].
template <int R, int BITS>
__attribute__((noinline)) void add_wide(const float* x, const float* sums, const float* wide, const Head (&heads)[2],
                                        float* totals) {
    floats low[R] = {}, high[R] = {};
#pragma GCC unroll 2
    for (int64_t k = 0; k < GROUP; k++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) step(low[r], high[r], x + r * GROUP + k, wide + k * PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        floats total = load(totals + r * PANEL), upper = load(totals + r * PANEL + LANES);
        add_group<BITS>(total, low[r], heads[0], sums + r);
        add_group<BITS>(upper, high[r], heads[1], sums + r);
        store(totals + r * PANEL, total);
        store(totals + r * PANEL + LANES, upper);
    }
}

// Many rows, at most ROWS, times a panel. A group's weights are widened once for all rows.
template <int BITS, typename O>
void many_rows(const float* x, const float* sums, int64_t rows, const Panel<BITS>& panel, Ahead ahead, O* out,
               int64_t outputs, int64_t width) {
    alignas(64) float wide[GROUP * PANEL], totals[ROWS * PANEL];
    std::memset(totals, 0, rows * PANEL * sizeof(float));
    const Parts tiles(rows, MOST);
    for (int64_t g = 0; g < panel.groups; g++, x += rows * GROUP, sums += rows) {
        ahead.fetch();
        widen_group(panel, g, wide);
        const Head heads[2] = {panel.head(0, g), panel.head(1, g)};
        for (int64_t t = 0; t < tiles.count; t++) {
            const int64_t first = tiles.first(t);
            with_constant<MOST>(tiles.size(t), [&](auto size) {
                add_wide<size, BITS>(x + first * GROUP, sums + first, wide, heads, totals + first * PANEL);
            });
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            store_half(out + r * outputs + half * LANES, load(totals + r * PANEL + half * LANES), width - half * LANES);
}

template <int BITS, typename T, typename O>
void product_of_panels(const T* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    const int64_t groups = inputs / GROUP, panel_bytes = groups * BLOCK<BITS>, lines = (panel_bytes + 63) / 64;
    const int64_t panels = (outputs + PANEL - 1) / PANEL, threads = omp_get_max_threads();
    const int64_t cached = std::clamp<int64_t>(CACHED / (inputs * sizeof(float)), MOST, ROWS);
    const Parts passes(rows, panels >= 4 * threads ? cached : ROWS);
    const Rows<BITS, float> laid(x, passes, groups);
    const int64_t tasks = panels * passes.count;
    // Few rows are memory-bound, which long runs suit. Many are compute-bound, and no core should wait for another.
    const int64_t chunk = rows <= FEW ? std::max<int64_t>(1, (tasks + threads - 1) / threads) : 1;
#pragma omp parallel for schedule(dynamic, chunk)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t n = task % panels, first = passes.first(task / panels), size = passes.size(task / panels);
        const int64_t next = n + (chunk == 1 ? threads : 1), column = n * PANEL;
        const Ahead ahead{packed + next * panel_bytes, next < panels ? (lines + groups - 1) / groups : 0};
        const Panel<BITS> panel{packed + n * panel_bytes, groups};
        const float *values = laid.values(first), *sums = laid.sums(first);
        O* to = out + first * outputs + column;
        if (size > FEW)
            many_rows(values, sums, size, panel, ahead, to, outputs, outputs - column);
        else
            with_constant<FEW>(size, [&](auto count) {
                few_rows<count>(values, sums, panel, ahead, to, outputs, outputs - column);
            });
    }
}

}  // namespace
