// Finds the largest scores of a row without sorting it, and computes exponentials of distances from them.
#pragma once
#include <algorithm>
#include <functional>

#include "common.h"

constexpr int64_t GROUP = 64;  // neighbours per group

static inline int64_t groups_in(int64_t count) { return (count + GROUP - 1) / GROUP; }

// The largest score. tops [groups_in(count)] gets the largest score of each group.
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

// A bound that at least k scores reach: the k-th largest of the groups' largest scores, which is usually close to the
// k-th largest score (bucketed selection, as in Chern et al., 2022). Reorders tops. k must be at most their number.
static inline float reached_by(float* tops, int64_t groups, int64_t k) {
    std::nth_element(tops, tops + k - 1, tops + groups, std::greater<float>());
    return tops[k - 1];
}

// e^-below for below >= 0, to about 1 ulp, in the same steps as exp_of. From 87 on it is the smallest normal number.
// With FP contraction off the result has the same bits as separate operations.
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
