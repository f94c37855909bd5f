// What products with INT8 activations are made of: rounding rows, multiplying bytes, sharing the work.
//
// Weights lie in panels of two halves of LANES outputs. Rows are rounded once per product and laid out for the tiles
// that take them. Four inputs of a row, the same for all lanes, meet four weights in each lane. Sums of integers are
// exact, and scaled sums are added up in one order: what a row gives depends on no other row.
#pragma once
#include <memory>

#include "linear.h"

namespace {

constexpr int64_t GROUP = 32;  // inputs that share a scale
constexpr int64_t QUAD = 4;    // inputs that one step takes
constexpr int64_t CACHED = 384 * 1024;  // bytes of rows per pass over the panels: they stay in the L2 cache

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline ints load_ints(const void* p) {
    ints x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Adds the products of four weights in each lane with four inputs.
#if defined(__AVX512VNNI__)
constexpr int OFFSET = 128;  // of a weight in memory: the instruction multiplies unsigned with signed bytes
static inline void step(ints& sum, ints weights, const int8_t* x) {
    typedef int32_t __attribute__((may_alias)) quad;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const quad*)x));
}
#else
constexpr int OFFSET = 0;
static inline void step(ints& sum, ints weights, const int8_t* x) {
    int32_t quad;
    std::memcpy(&quad, x, sizeof quad);
    const ints inputs = ints{} + quad;
#if defined(__AVX512BW__)
    typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
    const auto even = [](ints v) { return (__m512i)((shorts)v << 8 >> 8); };
    const auto odd = [](ints v) { return (__m512i)((shorts)v >> 8); };
    sum += (ints)_mm512_madd_epi16(even(inputs), even(weights)) + (ints)_mm512_madd_epi16(odd(inputs), odd(weights));
#elif defined(__AVX2__) && !LANES_512
    // the weights' sizes times inputs with the weights' signs: 2 * 128 * 127 fits in 16 bits
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights),
                                               _mm256_sign_epi8((__m256i)inputs, (__m256i)weights));
    sum += (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int shift = 24; shift >= 0; shift -= 8) sum += (inputs << shift >> 24) * (weights << shift >> 24);
#endif
}
#endif

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

// The nearest integers, ties to even, of numbers up to 2^22: adding 1.5 * 2^23 leaves no fraction.
static inline ints nearest(floats x) { return (ints)(x + 12582912.0f) - 0x4b400000; }

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

// Calls work(constant) with a number from 1 to TILE.
template <typename F>
static inline void with_constant(int64_t number, F&& work) {
#define CASE(R)                                                                 \
    case R:                                                                     \
        if constexpr (R <= TILE) return work(std::integral_constant<int, R>()); \
        break;
    switch (number) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

// Rows in tiles of at most TILE, all of nearly as many.
struct Tiles {
    int64_t rows, count;

    explicit Tiles(int64_t rows) : rows(rows), count((rows + TILE - 1) / TILE) {}
    int64_t first(int64_t tile) const { return tile * rows / count; }
    int64_t size(int64_t tile) const { return first(tile + 1) - first(tile); }
};

// What a row's group of integers is multiplied with, and what its sums begin with to undo the weights' offset.
struct Scale {
    float scale;
    int32_t offset;
};

// What GCC makes of the portable forms goes through memory.
#if LANES_512
static inline floats load_row(const float* p) { return load(p); }
static inline floats load_row(const bf16* p) {
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
static inline uint32_t largest_of(words x) { return _mm512_reduce_max_epu32((__m512i)x); }
static inline int32_t sum_of(ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
static inline void store_bytes(int8_t* p, ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
#else
template <typename T>
static inline floats load_row(const T* p) { return load(p); }
static inline uint32_t largest_of(words x) {
    uint32_t most = 0;
    for (int l = 0; l < LANES; l++) most = std::max<uint32_t>(most, x[l]);
    return most;
}
static inline int32_t sum_of(ints x) {
    int32_t sum = 0;
    for (int l = 0; l < LANES; l++) sum += x[l];
    return sum;
}
static inline void store_bytes(int8_t* p, ints x) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    const bytes narrowed = __builtin_convertvector(x, bytes);
    std::memcpy(p, &narrowed, sizeof narrowed);
}
#endif

// Rounds a group to nearest, ties to even: the largest number becomes 127.
template <typename T>
static inline Scale quantize(const T* x, int8_t* out) {
    floats v[GROUP / LANES];
    words most = {};
    for (int i = 0; i < GROUP / LANES; i++) {
        v[i] = load_row(x + i * LANES);
        const words size = (words)v[i] & 0x7fffffff;  // the bits of a size grow with it, and NaN's are beyond all
        most = size > most ? size : most;
    }
    const uint32_t bits = largest_of(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    ints sum = {};
    for (int i = 0; i < GROUP / LANES; i++) {
        const ints q = nearest(v[i] * inverse);
        store_bytes(out + i * LANES, q);
        sum += q;
    }
    return {largest / 127.0f, OFFSET == 0 ? 0 : -OFFSET * sum_of(sum)};
}

// Rows in INT8: of each tile, group and row GROUP integers and a scale.
class Int8Rows {
   public:
    // x [rows, width], of which the last group may have fewer.
    template <typename T>
    Int8Rows(const T* x, const Tiles& tiles, int64_t width, int64_t groups)
        : groups(groups), integers(new int8_t[tiles.rows * groups * GROUP]), factors(new Scale[tiles.rows * groups]) {
#pragma omp parallel for schedule(static) if (tiles.count > 1)
        for (int64_t tile = 0; tile < tiles.count; tile++) {
            const int64_t first = tiles.first(tile), size = tiles.size(tile);
            for (int64_t r = 0; r < size; r++)
                for (int64_t g = 0; g < groups; g++) {
                    const T* from = x + (first + r) * width + g * GROUP;
                    T last[GROUP] = {};
                    if ((g + 1) * GROUP > width) {
                        std::copy(from, from + width - g * GROUP, last);
                        from = last;
                    }
                    const int64_t place = first * groups + g * size + r;
                    factors[place] = quantize(from, &integers[place * GROUP]);
                }
        }
    }

    // Those of a tile, by its first row.
    const int8_t* values(int64_t first) const { return &integers[first * groups * GROUP]; }
    const Scale* scales(int64_t first) const { return &factors[first * groups]; }

   private:
    int64_t groups;
    std::unique_ptr<int8_t[]> integers;
    std::unique_ptr<Scale[]> factors;
};

// The part of a later panel that a tile asks memory for, some lines in each of its steps, while it computes.
struct Ahead {
    const uint8_t* place;
    int64_t lines;

    void fetch() {
        for (int64_t i = 0; i < lines; i++) _mm_prefetch((const char*)place + i * 64, _MM_HINT_T1);
        place += lines * 64;
    }
};

// Calls work(panel, tile, ahead) for every panel and tile, in parallel; each fetches ahead in every group of each half.
template <typename F>
static inline void for_panels_of_tiles(const Tiles& tiles, int64_t groups, const uint8_t* packed, int64_t panel_bytes,
                                       int64_t outputs, F&& work) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, threads = omp_get_max_threads();
    const int64_t most = panels >= 4 * threads ? CACHED / (groups * GROUP * TILE) + 1 : ROWS / TILE;
    const int64_t passes = (tiles.count + most - 1) / most, tasks = panels * passes;
    // A few rows are bound by memory, which likes long runs; many by arithmetic, where no core is to wait for another.
    const int64_t chunk = tiles.count == 1 ? (tasks + threads - 1) / threads : 1;
    const int64_t lines = (panel_bytes + 63) / 64;
#pragma omp parallel for schedule(dynamic, chunk)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t panel = task % panels, pass = task / panels;
        const int64_t begin = pass * tiles.count / passes, end = (pass + 1) * tiles.count / passes;
        const int64_t next = panel + (chunk == 1 ? threads : 1), steps = 2 * groups * (end - begin);
        const int64_t share = next < panels ? (lines + steps - 1) / steps : 0;
        for (int64_t tile = begin; tile < end; tile++)
            work(panel, tile, Ahead{packed + next * panel_bytes + (tile - begin) * 2 * groups * share * 64, share});
    }
}

}  // namespace
