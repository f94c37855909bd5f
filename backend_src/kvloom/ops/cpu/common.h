// Code that all CPU ops share: vectors of the machine's width, bf16, exp.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#if defined(__AVX512F__)
#define LANES_512 1
constexpr int LANES = 16;
#else
#define LANES_512 0
constexpr int LANES = 8;
#endif

struct bf16 {
    uint16_t bits;
};

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef float floats4 __attribute__((vector_size(16)));

static inline floats load(const float* p) {
    floats x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

static inline floats load(const bf16* p) {
    halves h;
    std::memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
}

static inline words load(const uint32_t* p) {
    words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

static inline void store(float* p, floats x) {
    std::memcpy(p, &x, sizeof x);
}

static inline void store(uint32_t* p, words x) {
    std::memcpy(p, &x, sizeof x);
}

// Rounds to nearest, ties to even. NaN stays NaN. The CPU's own instruction treats numbers below 2^-126 as zero.
static inline void store(bf16* p, floats x) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &h, sizeof h);
#else
    words u = (words)x;
    words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    words nan = (words)(x != x);
    halves h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), halves);
    std::memcpy(p, &h, sizeof h);
#endif
}

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

static inline void narrow(float* p, float x) { *p = x; }
static inline void narrow(bf16* p, float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    p->bits = x != x ? 0x7fc0 : (uint16_t)rounded;
}

// a * b + c, rounded once if the CPU can. Without this GCC decides about fusing by the surrounding code and by the CPU
// that it tunes for (not in chains on Zen), and several forms of one function would differ in their last bits.
static inline floats fused(floats a, floats b, floats c) {
#if LANES_512
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// e^x for x <= 88, to about 1 ulp: 2^n * e^r with |r| <= ln(2) / 2 and ln(2) in two parts (as Cephes' expf).
// Below -87 it is the smallest normal number, which is negligible in a softmax.
static inline floats exp_of(floats x) {
    x = x < -87.0f ? floats{} - 87.0f : x;
    const floats magic = floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    floats shifted = x * 1.44269504088896341f + magic;
    floats n = shifted - magic;
    floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    floats p = floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    words scale = ((words)shifted << 23) + 0x3f800000u;
    return p * (floats)scale;
}

// Swaps the off-diagonal blocks of SIZE lanes in each pair of blocks.
template <int SIZE>
static inline void swap_blocks(floats* rows) {
    typedef int32_t lanes __attribute__((vector_size(4 * LANES)));
    lanes first, second;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) {
        first[l] = l & SIZE ? LANES + l - SIZE : l;
        second[l] = l & SIZE ? LANES + l : l + SIZE;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & SIZE) continue;
        const floats a = rows[i], b = rows[i + SIZE];
        rows[i] = __builtin_shuffle(a, b, first);
        rows[i + SIZE] = __builtin_shuffle(a, b, second);
    }
}

// Transposes LANES vectors of LANES numbers by swapping ever larger blocks (Eklundh, 1972).
static inline void transpose(floats* rows) {
    swap_blocks<1>(rows);
    swap_blocks<2>(rows);
    swap_blocks<4>(rows);
    if constexpr (LANES == 16) swap_blocks<8>(rows);
}

// The sum and the largest number of a vector.
#if LANES_512
// Intrinsics, because GCC compiles portable forms to loads and stores.
static inline float sum_of(floats x) { return _mm512_reduce_add_ps((__m512)x); }
static inline float max_of(floats x) { return _mm512_reduce_max_ps((__m512)x); }
#else
static inline void halve(floats x, floats4& low, floats4& high) {
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, (const char*)&x + sizeof low, sizeof high);
}
static inline float sum_of(floats x) {
    floats4 low, high;
    halve(x, low, high);
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}
static inline float max_of(floats x) {
    floats4 low, high;
    halve(x, low, high);
    low = low > high ? low : high;
    return std::max(std::max(low[0], low[1]), std::max(low[2], low[3]));
}
#endif

#if LANES_512
// 2^x with an error of 3e-6, a thousandth of the rounding to bf16, by the best polynomial on [-1/2, 1/2].
static inline floats rough_exp2(floats x) {
    const floats f = (floats)_mm512_reduce_ps((__m512)x, 0);  // x minus the nearest integer
    floats p = f * 9.58285e-3f + 5.590642e-2f;
    p = p * f + 2.4024099e-1f;
    p = p * f + 6.9312419e-1f;
    p = p * f + 1.0f;
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
}
#endif
