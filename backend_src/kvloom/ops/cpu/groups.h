// The layout of weights of 4 or 8 bits in panels, and of rows for their products.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t CACHED = 384 * 1024;  // bytes of rows per pass over the panels, which stay in the L2 cache

// A panel has the values of both halves, group by group, then their scales and, with 4 bits, their minima in fp16. A
// word of values holds WORD inputs of one output. The low half has the even inputs and the high half the odd inputs, so
// that both inputs of a pair are widened together.
template <int BITS>
constexpr int64_t WORD = 32 / BITS;
template <int BITS>
constexpr int64_t VALUES = GROUP * LANES * BITS / 8;
template <int BITS>
constexpr int64_t HEAD = (BITS == 4 ? 2 : 1) * LANES * 2;
template <int BITS>
constexpr int64_t BLOCK = 2 * (VALUES<BITS> + HEAD<BITS>);

// The place of a half's group in a panel.
template <int BITS>
int64_t values_at(int64_t half, int64_t g, int64_t groups) {
    return (half * groups + g) * VALUES<BITS>;
}
template <int BITS>
int64_t head_at(int64_t half, int64_t g, int64_t groups) {
    return 2 * groups * VALUES<BITS> + (half * groups + g) * HEAD<BITS>;
}

template <int BITS>
constexpr int shift_of(int64_t k) {
    return k % 2 * 16 + k % WORD<BITS> / 2 * BITS;
}

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline words load_words(const uint8_t* p) {
    words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

template <int BITS>
static inline floats value_of(words word, int64_t k) {
    if constexpr (BITS == 4)
        return __builtin_convertvector((ints)(word >> shift_of<4>(k) & 15), floats);
    else
        return __builtin_convertvector((ints)(word << (24 - shift_of<8>(k))) >> 24, floats);
}

// The word of a panel that holds an input of a group.
template <int BITS>
const uint8_t* word_at(const uint8_t* panel, int64_t lane, int64_t g, int64_t k, int64_t groups) {
    return panel + values_at<BITS>(lane / LANES, g, groups) + (k / WORD<BITS> * LANES + lane % LANES) * 4;
}

// Memory that a thread keeps for its next call, because allocating it costs more than filling it.
class Kept {
   public:
    template <typename T>
    T* take(int64_t count) {
        const int64_t needed = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
        if (needed > size) {
            lines.reset();  // freed before the larger one is allocated
            lines.reset(new Line[needed]);
            size = needed;
        }
        return (T*)lines.get();
    }

   private:
    struct alignas(64) Line {
        char bytes[64];
    };
    std::unique_ptr<Line[]> lines;
    int64_t size = 0;
};

thread_local Kept inputs_kept, totals_kept;

// Rows laid out by parts. For each part, group and row there are GROUP inputs and, with 4 bits, their sum. Only one
// such object exists at a time.
template <int BITS, typename T>
class Rows {
   public:
    // x [rows, inputs] of type T, or of a type that T widens.
    template <typename X>
    Rows(const X* x, const Parts& parts, int64_t groups)
        : groups(groups),
          inputs(inputs_kept.take<T>(parts.rows * groups * GROUP)),
          totals(totals_kept.take<float>(BITS == 4 ? parts.rows * groups : 0)) {
#pragma omp parallel for schedule(static) if (parts.rows > TILE)
        for (int64_t row = 0; row < parts.rows; row++) {
            const int64_t part = parts.of(row), first = parts.first(part), size = parts.size(part);
            for (int64_t g = 0; g < groups; g++) {
                const int64_t place = first * groups + g * size + row - first;
                const X* from = x + (row * groups + g) * GROUP;
                lay(from, &inputs[place * GROUP]);
                if (BITS == 4) totals[place] = sum_of_group(from);
            }
        }
    }

    // The data of a part, by its first row.
    const T* values(int64_t first) const { return &inputs[first * groups * GROUP]; }
    const float* sums(int64_t first) const { return &totals[first * groups]; }

   private:
    int64_t groups;
    T* inputs;
    float* totals;

    static void lay(const T* from, T* to) { std::memcpy(to, from, GROUP * sizeof(T)); }
    template <typename X>
    static void lay(const X* from, T* to) {
        for (int64_t k = 0; k < GROUP; k += LANES) store(to + k, load_row(from + k));
    }

    template <typename X>
    static float sum_of_group(const X* x) {
        floats sum = {};
        for (int64_t k = 0; k < GROUP; k += LANES) sum += load_row(x + k);
        return sum_of(sum);
    }
};

}  // namespace
