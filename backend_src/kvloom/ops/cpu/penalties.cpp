// Changes to single scores and back; ops/penalties.py defines them.
#include <cfloat>

#include "common.h"

namespace {

constexpr int64_t PARALLEL_PLACES = 4096;  // fewer are done before other threads have woken up

// An overflow must neither ban a token nor turn into NaN further on.
inline float rounded(double x) { return (float)(x < -FLT_MAX ? -FLT_MAX : x > FLT_MAX ? FLT_MAX : x); }

}  // namespace

// Bias, repetition penalty, what is subtracted, ban, in this order, at index [count], of which none comes twice and
// those below 0 are skipped; saved [count] gets what was there.
extern "C" void kvloom_edit(float* scores, const int64_t* index, const double* bias, const double* repetition,
                            const double* subtracted, const uint8_t* banned, int64_t count, float* saved) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_PLACES)
    for (int64_t i = 0; i < count; i++) {
        if (index[i] < 0) continue;
        float& score = scores[index[i]];
        saved[i] = score;
        float x = rounded((double)score + bias[i]);
        if (repetition[i] != 1.0) x = rounded(x > 0.0f ? x / repetition[i] : x * repetition[i]);
        x = rounded((double)x - subtracted[i]);
        score = banned[i] ? -__builtin_inff() : x;
    }
}

extern "C" void kvloom_restore(float* scores, const int64_t* index, const float* saved, int64_t count) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_PLACES)
    for (int64_t i = 0; i < count; i++)
        if (index[i] >= 0) scores[index[i]] = saved[i];
}
