// Gated activations, on vectors.
#pragma once
#include <type_traits>

#include "common.h"

namespace {

// silu(gate) * up, for a result of type O.
template <typename O>
static inline floats silu_mul_of(floats gate, floats up) {
#if LANES_512
    if constexpr (std::is_same_v<O, bf16>) {
        // e^-gate as 2^whole * 2^f, the latter by the polynomial that is nearest on [-1/2, 1/2] (to 3e-6), and a
        // reciprocal of 14 bits: the error is a sixtieth of the rounding to bf16, the time half of the exact form's.
        const floats power = gate * -1.44269504088896341f;
        const floats whole = (floats)_mm512_roundscale_ps((__m512)power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const floats f = power - whole;
        floats p = floats{} + 9.58285e-3f;
        p = p * f + 5.590642e-2f;
        p = p * f + 2.4024099e-1f;
        p = p * f + 6.9312419e-1f;
        p = p * f + 1.0f;
        const floats e = (floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
        return gate * up * (floats)_mm512_rcp14_ps((__m512)(e + 1.0f));
    }
#endif
    floats minus = floats{} - gate;
    minus = minus > 88.0f ? floats{} + 88.0f : minus;
    return gate / (exp_of(minus) + 1.0f) * up;
}

}  // namespace
