// Changes to single scores and back; ops/penalties.py defines them.
#include <algorithm>
#include <cfloat>

#include "common.h"

namespace {

constexpr int64_t PARALLEL_PLACES = 4096;  // fewer are done before other threads have woken up
constexpr int64_t WIDTH = LANES / 2, CHUNK = 256;

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
    for (int64_t start = 0; start < count; start += CHUNK) {
        const int64_t size = std::min(CHUNK, count - start);
        const int64_t* places = index + start;
        double changed[CHUNK];
        for (int64_t i = 0; i < size; i++) {
            if (places[i] >= 0) saved[start + i] = scores[places[i]];
            changed[i] = places[i] >= 0 ? saved[start + i] : 0.0;
        }
        for (int64_t i = 0; i < size; i += WIDTH) {
            const int64_t at = start + i, left = count - at;
            doubles x = rounded(some(changed + i, size - i, 0.0) + some(bias + at, left, 0.0));
            const doubles penalty = some(repetition + at, left, 1.0);
            x = rounded(x > 0.0 ? x / penalty : x * penalty);
            x = rounded(x - some(subtracted + at, left, 0.0));
            std::memcpy(changed + i, &x, sizeof x);
        }
        for (int64_t i = 0; i < size; i++)
            if (places[i] >= 0) scores[places[i]] = banned[start + i] ? -__builtin_inff() : (float)changed[i];
    }
}

extern "C" void kvloom_restore(float* scores, const int64_t* index, const float* saved, int64_t count) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_PLACES)
    for (int64_t i = 0; i < count; i++)
        if (index[i] >= 0) scores[index[i]] = saved[i];
}
