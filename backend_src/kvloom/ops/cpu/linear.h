// Code that all products with a packed weight share: y = x W^T.
//
// The weight is in panels of PANEL outputs, so that a panel is read once, in order, at memory bandwidth, while the sums
// of a tile of rows stay in registers. A row's result does not depend on other rows: sums are added in the same order
// in every tile.
#pragma once
#include <algorithm>
#include <atomic>
#include <omp.h>
#include <type_traits>
#include <utility>
#include <vector>

#include "common.h"

namespace {

constexpr int PANEL = 2 * LANES;
constexpr int TILE = LANES == 16 ? 12 : 4;  // rows per tile: their sums fit into registers
constexpr int64_t ROWS = 12 * 12;  // rows per pass over a panel: their inputs fit into the L2 cache

// Inputs per step: bf16 is multiplied in pairs if the CPU can.
#if defined(__AVX512BF16__)
constexpr int64_t PAIR = 2;
#else
constexpr int64_t PAIR = 1;
#endif

template <typename T>
constexpr int64_t STEP = std::is_same_v<T, bf16> ? PAIR : 1;

// Calls work(constant) with a number from 1 to MAX.
template <typename F, int... I>
static inline void with_constant(int64_t number, std::integer_sequence<int, I...>, F&& work) {
    ((number == I + 1 ? work(std::integral_constant<int, I + 1>()) : void()), ...);
}
template <int MAX, typename F>
static inline void with_constant(int64_t number, F&& work) {
    with_constant(number, std::make_integer_sequence<int, MAX>(), work);
}

// Adds STEP inputs of a row times LANES outputs' weights: fp32, or pairs of bf16.
static inline void step(floats& sum, const float* x, floats w) { sum += *x * w; }

static inline void step(floats& sum, const bf16* x, floats w) {
#if defined(__AVX512BF16__)
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    sum = (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
#else
    sum += widen(*x) * w;
#endif
}

static inline floats load_weights(const float* w) { return load(w); }

static inline floats load_weights(const bf16* w) {
#if defined(__AVX512BF16__)
    floats pairs;
    std::memcpy(&pairs, w, sizeof pairs);
    return pairs;
#else
    return load(w);
#endif
}

// The same for the two halves of a panel.
template <typename T>
static inline void step(floats& low, floats& high, const T* x, const T* w) {
    step(low, x, load_weights(w));
    step(high, x, load_weights(w + LANES * STEP<T>));
}

// How many tasks of a thread's run are taken. Each counter has its own cache line.
struct alignas(64) Taken {
    std::atomic<int64_t> count{0};
};

// Call it in each thread of a parallel region. It calls work(owner, task) for the tasks of the thread's own run, which
// has size(owner) tasks, and then for remaining tasks of other threads.
template <typename N, typename F>
static inline void work_on_runs(std::vector<Taken>& taken, N&& size, F&& work) {
    const int64_t threads = taken.size();
    for (int64_t turn = 0; turn < threads; turn++) {
        const int64_t owner = (omp_get_thread_num() + turn) % threads;
        for (int64_t task; (task = taken[owner].count++) < size(owner);) work(owner, task);
    }
}

// Calls work(panel, first row, end row) for every panel and pass, in parallel.
template <typename F>
static inline void for_panels(int64_t rows, int64_t panels, F&& work) {
    const int64_t threads = omp_get_max_threads();
    if (rows <= ROWS || rows < threads * ROWS / 2) {
        // Runs of panels that get shorter: long runs suit memory, and with short ones no core waits for another.
#pragma omp parallel
        for (int64_t first = 0; first < rows; first += ROWS)
#pragma omp for schedule(guided) nowait
            for (int64_t panel = 0; panel < panels; panel++) work(panel, first, std::min(rows, first + ROWS));
        return;
    }
    // Many rows: each thread has the same rows in every op, in its own cache, and helps others when it is done.
    const int64_t passes = (rows + threads * ROWS - 1) / (threads * ROWS), parts = threads * passes;
    std::vector<Taken> taken(threads);
#pragma omp parallel num_threads(threads)
    work_on_runs(taken, [&](int64_t) { return passes * panels; }, [&](int64_t owner, int64_t task) {
        const int64_t part = owner * passes + task / panels;
        work(task % panels, rows * part / parts, rows * (part + 1) / parts);
    });
}

}  // namespace
