// Changes to single scores and back; ops/penalties.py defines them.
#include <algorithm>
#include <cfloat>

#include "common.h"

namespace {

constexpr int64_t PARALLEL_PLACES = 4096;  // fewer are done before other threads have woken up
constexpr int64_t WIDTH = LANES / 2;

// Vectors have no branch on a score's sign, which nothing can foretell.
typedef double doubles __attribute__((vector_size(8 * WIDTH)));
typedef float singles __attribute__((vector_size(4 * WIDTH)));

// WIDTH numbers, or as many as there are and then the filling.
inline doubles some(const double* p, int64_t count, double filling) {
    doubles x = doubles{} + filling;
    if (count >= WIDTH)
        std::memcpy(&x, p, sizeof x);
    else
        std::memcpy(&x, p, sizeof(double) * count);
    return x;
}

// To fp32 and back; an overflow must neither ban a token nor turn into NaN further on.
inline doubles rounded(doubles x) {
    const doubles most = doubles{} + (double)FLT_MAX;
    x = x > -most ? x : -most;
    x = x < most ? x : most;
    return __builtin_convertvector(__builtin_convertvector(x, singles), doubles);
}

}  // namespace

// Bias, repetition penalty, what is subtracted, ban, in this order, at index [count], of which none comes twice and
// those below 0 are skipped; saved [count] gets what was there.
extern "C" void kvloom_edit(float* scores, const int64_t* index, const double* bias, const double* repetition,
                            const double* subtracted, const uint8_t* banned, int64_t count, float* saved) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_PLACES)
    for (int64_t start = 0; start < count; start += WIDTH) {
        const int64_t left = count - start, end = std::min(start + WIDTH, count);
        double old[WIDTH] = {};
        for (int64_t i = start; i < end; i++) {
            if (index[i] < 0) continue;
            saved[i] = scores[index[i]];
            old[i - start] = saved[i];
        }
        doubles x = rounded(some(old, WIDTH, 0.0) + some(bias + start, left, 0.0));
        const doubles penalty = some(repetition + start, left, 1.0);
        x = rounded(x > 0.0 ? x / penalty : x * penalty);
        x = rounded(x - some(subtracted + start, left, 0.0));
        for (int64_t i = start; i < end; i++)
            if (index[i] >= 0) scores[index[i]] = banned[i] ? -__builtin_inff() : (float)x[i - start];
    }
}

extern "C" void kvloom_restore(float* scores, const int64_t* index, const float* saved, int64_t count) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_PLACES)
    for (int64_t i = 0; i < count; i++)
        if (index[i] >= 0) scores[index[i]] = saved[i];
}
