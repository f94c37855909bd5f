// Edits single scores and restores them; see ops/penalties.py.
#include <algorithm>
#include <cfloat>

#include "common.h"

namespace {

constexpr int64_t PARALLEL_PLACES = 4096;  // fewer edits are done before other threads wake up
constexpr int64_t WIDTH = LANES / 2, CHUNK = 256;

// Vectors avoid a branch on a score's sign, which can't be predicted.
typedef double doubles __attribute__((vector_size(8 * WIDTH)));
typedef float singles __attribute__((vector_size(4 * WIDTH)));

// WIDTH numbers, padded if there are fewer.
inline doubles some(const double* p, int64_t count, double filling) {
    doubles x = doubles{} + filling;
    if (count >= WIDTH)
        std::memcpy(&x, p, sizeof x);
    else
        std::memcpy(&x, p, sizeof(double) * count);
    return x;
}

// Rounds to fp32. It saturates, because infinity would ban a token or become NaN later.
inline doubles rounded(doubles x) {
    const doubles most = doubles{} + (double)FLT_MAX;
    x = x > -most ? x : -most;
    x = x < most ? x : most;
    return __builtin_convertvector(__builtin_convertvector(x, singles), doubles);
}

}  // namespace

// Applies bias, repetition penalty, subtraction and ban, in this order, at index [count]. Indices are unique, and
// negative ones are skipped. saved [count] gets the old scores.
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
