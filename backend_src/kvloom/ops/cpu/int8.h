// Building blocks of products with INT8 activations: quantizing rows and multiplying bytes.
//
// Rows are quantized once per product and laid out for tiles. A step multiplies four inputs of a row, the same in all
// lanes, with four weights in each lane. Sums of integers are exact.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t QUAD = 4;  // inputs per step

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline ints load_ints(const void* p) {
    ints x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Adds the products of four weights in each lane and four inputs.
#if defined(__AVX512VNNI__)
constexpr int OFFSET = 128;  // added to stored weights, as the instruction multiplies unsigned and signed bytes
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
    // |weight| times input with the weight's sign: 2 * 128 * 127 fits in 16 bits
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights),
                                               _mm256_sign_epi8((__m256i)inputs, (__m256i)weights));
    sum += (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int shift = 24; shift >= 0; shift -= 8) sum += (inputs << shift >> 24) * (weights << shift >> 24);
#endif
}
#endif

// A row's scale for a group, and the initial value of its sums, which cancels the weights' offset.
struct Scale {
    float scale;
    int32_t offset;
};

// The largest number of a vector. Storing N vectors of integers as bytes, with their sum. Intrinsics, because GCC
// compiles portable forms to loads and stores.
#if LANES_512
static inline uint32_t largest_of(words x) { return _mm512_reduce_max_epu32((__m512i)x); }
template <size_t N>
static inline int32_t store_bytes(int8_t* p, const ints (&x)[N]) {
    __m128i sums = _mm_setzero_si128();
    for (size_t i = 0; i < N; i++) {
        const __m128i narrowed = _mm512_cvtepi32_epi8((__m512i)x[i]);
        _mm_storeu_si128((__m128i*)p + i, narrowed);
        // as unsigned numbers, 128 larger each, eight of them are added at once
        const __m128i raised = _mm_xor_si128(narrowed, _mm_set1_epi8(-128));
        sums = _mm_add_epi32(sums, _mm_sad_epu8(raised, _mm_setzero_si128()));
    }
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 128 * LANES * (int32_t)N;
}
#else
static inline uint32_t largest_of(words x) {
    uint32_t most = 0;
    for (int l = 0; l < LANES; l++) most = std::max<uint32_t>(most, x[l]);
    return most;
}
template <size_t N>
static inline int32_t store_bytes(int8_t* p, const ints (&x)[N]) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    int32_t sum = 0;
    for (const ints& part : x) {
        const bytes narrowed = __builtin_convertvector(part, bytes);
        std::memcpy(p, &narrowed, sizeof narrowed);
        for (int l = 0; l < LANES; l++) sum += p[l];
        p += LANES;
    }
    return sum;
}
#endif

// Quantizes a group of G numbers, rounding to nearest, ties to even. The largest number becomes 127.
template <int64_t G, typename T>
static inline Scale quantize(const T* x, int8_t* out) {
    floats v[G / LANES];
    words most = {};
    for (int i = 0; i < G / LANES; i++) {
        v[i] = load_row(x + i * LANES);
        const words size = (words)v[i] & 0x7fffffff;  // the bits of |v| are ordered like |v|, and NaN's are larger
        most = size > most ? size : most;
    }
    const uint32_t bits = largest_of(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    ints rounded[G / LANES];  // adding 1.5 * 2^23 rounds numbers up to 2^22 to integers
    for (int i = 0; i < G / LANES; i++) rounded[i] = (ints)(v[i] * inverse + 12582912.0f);
    const int32_t sum = store_bytes(out, rounded);
    return {largest / 127.0f, -OFFSET * sum};
}

// Rows in INT8. For each tile, group and row there are G integers and a scale; the largest integer is 127.
template <int64_t G>
class Int8Rows {
   public:
    Int8Rows(const Parts& tiles, int64_t groups)
        : tiles(tiles),
          groups(groups),
          integers(new int8_t[tiles.rows * groups * G]),
          factors(new Scale[tiles.rows * groups]) {}

    // Quantizes a row [width]. The last group may be shorter.
    template <typename T>
    void fill(int64_t row, const T* x, int64_t width) {
        const int64_t tile = tiles.of(row), first = tiles.first(tile), size = tiles.size(tile);
        int64_t place = first * groups + row - first, g = 0;
        for (; g < width / G; g++, place += size)
            factors[place] = quantize<G>(x + g * G, &integers[place * G]);
        if (g == groups) return;
        T last[G] = {};
        std::copy(x + g * G, x + width, last);
        factors[place] = quantize<G>(last, &integers[place * G]);
    }

    // The data of a tile, by its first row.
    const int8_t* values(int64_t first) const { return &integers[first * groups * G]; }
    const Scale* scales(int64_t first) const { return &factors[first * groups]; }

   private:
    const Parts tiles;
    const int64_t groups;
    std::unique_ptr<int8_t[]> integers;
    std::unique_ptr<Scale[]> factors;
};

}  // namespace
