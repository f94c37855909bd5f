// What products with INT8 activations are made of: rounding rows, multiplying bytes.
//
// Rows are rounded once per product and laid out for the tiles that take them. Four inputs of a row, the same for all
// lanes, meet four weights in each lane. Sums of integers are exact.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t QUAD = 4;  // inputs that one step takes

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

// The nearest integers, ties to even, of numbers up to 2^22: adding 1.5 * 2^23 leaves no fraction.
static inline ints nearest(floats x) { return (ints)(x + 12582912.0f) - 0x4b400000; }

// What a row's group of integers is multiplied with, and what its sums begin with to undo the weights' offset.
struct Scale {
    float scale;
    int32_t offset;
};

// What GCC makes of the portable forms goes through memory.
#if LANES_512
static inline uint32_t largest_of(words x) { return _mm512_reduce_max_epu32((__m512i)x); }
static inline int32_t sum_of(ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
static inline void store_bytes(int8_t* p, ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
#else
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

}  // namespace
