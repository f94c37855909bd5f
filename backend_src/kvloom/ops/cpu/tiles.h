// What products with weights in groups share: how rows and panels are cut into tiles, and shared out.
//
// Weights lie in panels of two halves of LANES outputs. A tile is some rows times a half: its sums stay in registers
// from the first group to the last, and are added up in the same order whatever the tile.
#pragma once
#include <memory>

#include "linear.h"

namespace {

constexpr int64_t GROUP = 32;  // inputs that share a scale

// fp16 to fp32, whatever is finite.
static inline floats load_halves(const uint8_t* p) {
    halves h;
    std::memcpy(&h, p, sizeof h);
#if LANES_512
    return (floats)_mm512_cvtph_ps((__m256i)h);
#else
    // the exponent's bias is put right by a product
    const words bits = __builtin_convertvector(h, words);
    const floats magnitude = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)magnitude | (bits & 0x8000) << 16);
#endif
}

// Some of a row. What GCC makes of the portable forms goes through memory.
#if LANES_512
static inline floats load_row(const float* p) { return load(p); }
static inline floats load_row(const bf16* p) {
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
#else
template <typename T>
static inline floats load_row(const T* p) { return load(p); }
#endif

// Results of R rows of half a panel, of which there may be fewer. The sums' names are known: they stay in registers.
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

// Rows in parts of at most `most`, all of nearly as many; a tile is one.
struct Parts {
    int64_t rows, count;

    explicit Parts(int64_t rows, int64_t most = TILE) : rows(rows), count((rows + most - 1) / most) {}
    int64_t first(int64_t part) const { return part * rows / count; }
    int64_t size(int64_t part) const { return first(part + 1) - first(part); }
    // the part of a row; there are rows
    int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }
};

// The part of a later panel that a tile asks memory for, some lines in each of its steps, while it computes.
struct Ahead {
    const uint8_t* place;
    int64_t lines;

    void fetch() {
        for (int64_t i = 0; i < lines; i++) _mm_prefetch((const char*)place + i * 64, _MM_HINT_T1);
        place += lines * 64;
    }

    // What is left after so many steps.
    Ahead after(int64_t steps) const { return {place + steps * lines * 64, lines}; }
};

}  // namespace
