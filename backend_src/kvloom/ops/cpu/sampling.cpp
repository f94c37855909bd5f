// The most likely token of each row, and whether the row is finite, in one pass over the scores.
#include <algorithm>

#include "common.h"
#include "replay.h"

namespace {

struct Best {
    int64_t token;
    bool finite;
};

Best likeliest(const float* scores, int64_t count) {
    floats best = floats{} - __builtin_inff();
    words at = {}, here = {}, infinite = {};
    for (int l = 0; l < LANES; l++) here[l] = l;
    const words exponent = words{} + 0x7f800000u;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES, here += LANES) {
        const floats x = load(scores + i);
        const auto better = x > best;
        best = better ? x : best;
        at = better ? here : at;
        infinite |= (words)(((words)x & exponent) == exponent);
    }
    float top = -__builtin_inff();
    int64_t token = 0;
    bool finite = true;
    auto consider = [&](float x, int64_t id) {
        if (x > top || (x == top && id < token)) top = x, token = id;
    };
    if (i)
        for (int l = 0; l < LANES; l++) consider(best[l], at[l]), finite &= !infinite[l];
    for (; i < count; i++) consider(scores[i], i), finite &= __builtin_isfinite(scores[i]);
    return {token, finite};
}

}  // namespace

// From scores [rows, vocab] computes the most likely token of each row, the first one if there are several, and 1 if
// the row has no NaN and no infinity.
extern "C" void kvloom_likeliest(const float* scores, int64_t rows, int64_t vocab, int64_t* tokens, uint8_t* finite) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const Best best = likeliest(scores + r * vocab, vocab);
        tokens[r] = best.token;
        finite[r] = best.finite;
    }
}
REPLAYED(kvloom_likeliest)
