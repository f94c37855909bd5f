// Code that products with weights in groups share: splitting rows and panels into tiles.
//
// Weights are in panels of two halves of LANES outputs. A tile is some rows times a half. Its sums stay in registers
// from the first group to the last and are added in the same order in every tile.
#pragma once
#include <memory>

#include "linear.h"

namespace {

constexpr int64_t GROUP = 32;  // inputs per scale

// Converts finite fp16 to fp32.
static inline floats load_halves(const uint8_t* p) {
    halves h;
    std::memcpy(&h, p, sizeof h);
#if LANES_512
    return (floats)_mm512_cvtph_ps((__m256i)h);
#else
    // the product corrects the exponent's bias
    const words bits = __builtin_convertvector(h, words);
    const floats magnitude = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)magnitude | (bits & 0x8000) << 16);
#endif
}

// Parts of a row. Intrinsics, because GCC compiles portable forms to loads and stores.
#if LANES_512
static inline floats load_row(const float* p) { return load(p); }
static inline floats load_row(const bf16* p) {
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
#else
template <typename T>
static inline floats load_row(const T* p) { return load(p); }
#endif

// Stores the results of R rows and half a panel, which may have fewer outputs. The sums stay in registers.
template <int R, typename O>
static inline __attribute__((always_inline)) void store_tile(O* out, int64_t outputs, const floats (&sums)[R],
                                                             int64_t width) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        if (width >= LANES) {
            store(out + r * outputs, sums[r]);
            continue;
        }
        float lanes[LANES];
        store(lanes, sums[r]);
        for (int64_t i = 0; i < width; i++) narrow(out + r * outputs + i, lanes[i]);
    }
}

// Splits rows into parts of nearly equal size, at most `most`. A tile is one part.
struct Parts {
    int64_t rows, count;

    explicit Parts(int64_t rows, int64_t most = TILE) : rows(rows), count((rows + most - 1) / most) {}
    int64_t first(int64_t part) const { return part * rows / count; }
    int64_t size(int64_t part) const { return first(part + 1) - first(part); }
    // the part of a row; there must be rows
    int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }
};

// The part of a later panel that a tile prefetches while it computes, some lines in each step.
struct Ahead {
    const uint8_t* place;
    int64_t lines;

    void fetch() {
        for (int64_t i = 0; i < lines; i++) _mm_prefetch((const char*)place + i * 64, _MM_HINT_T1);
        place += lines * 64;
    }

    // What is left after a number of steps.
    Ahead after(int64_t steps) const { return {place + steps * lines * 64, lines}; }
};

}  // namespace
