// The largest scores of a row without sorting it, and the exponentials of what lies below them.
#pragma once
#include <algorithm>
#include <functional>

#include "common.h"

constexpr int64_t GROUP = 64;  // neighbours of which the largest is known

static inline int64_t groups_in(int64_t count) { return (count + GROUP - 1) / GROUP; }

// The largest of the scores; tops [groups_in(count)] gets the largest of each GROUP neighbours.
static inline float largest_of(const float* scores, int64_t count, float* tops) {
    float whole = -__builtin_inff();
    for (int64_t start = 0; start < count; start += GROUP) {
        const int64_t end = std::min(start + GROUP, count);
        float top = -__builtin_inff();
#pragma omp simd reduction(max : top)
        for (int64_t i = start; i < end; i++) top = top > scores[i] ? top : scores[i];
        tops[start / GROUP] = top;
        whole = std::max(whole, top);
    }
    return whole;
}

// What at least k scores reach: the k-th largest of the groups' largest, which is most often close to the k-th largest
// of all (bucketed selection, as in Chern et al., 2022). Reorders tops; k must be at most their number.
static inline float reached_by(float* tops, int64_t groups, int64_t k) {
    std::nth_element(tops, tops + k - 1, tops + groups, std::greater<float>());
    return tops[k - 1];
}

// e^-below for below >= 0, about 1 ulp; the same steps as exp_of. From 87 on it is the smallest normal number.
// Where FP contraction is off, these are the bits that separate operations give.
static inline float exp_below(float below) {
    const float x = below < 87.0f ? -below : -87.0f;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float shifted = x * 1.44269504088896341f + magic;
    const float n = shifted - magic;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}
