// Products of a few rows with a packed weight: y = x W^T.
//
// The weight lies in panels of PANEL outputs, so that a panel is read once, in order, at the speed of memory, while
// the rows' sums stay in registers. A sum is added up in parts of PART inputs: sums of sums round about half as much
// as one long sum does. What a row gives depends on no other row.
#include <algorithm>
#include <immintrin.h>
#include <type_traits>

#include "common.h"

namespace {

constexpr int PANEL = 2 * LANES;
constexpr int64_t PART = 192;
constexpr int64_t ROWS = 96;  // rows per pass over a panel: their inputs stay in the L2 cache
constexpr int TILE = LANES == 16 ? 12 : 4;  // rows whose sums are in registers together

// Inputs that one step takes: bf16 is multiplied in pairs where the machine can.
#if defined(__AVX512BF16__)
constexpr int64_t PAIR = 2;
#else
constexpr int64_t PAIR = 1;
#endif

template <typename T>
constexpr int64_t STEP = std::is_same_v<T, bf16> ? PAIR : 1;

static inline void step(floats& low, floats& high, const float* x, const float* w) {
    low += *x * load(w);
    high += *x * load(w + LANES);
}

static inline void step(floats& low, floats& high, const bf16* x, const bf16* w) {
#if defined(__AVX512BF16__)
    int pair;
    std::memcpy(&pair, x, sizeof pair);
    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
    low = (floats)_mm512_dpbf16_ps((__m512)low, both, (__m512bh)_mm512_loadu_si512(w));
    high = (floats)_mm512_dpbf16_ps((__m512)high, both, (__m512bh)_mm512_loadu_si512(w + PANEL));
#else
    const float value = widen(*x);
    low += value * load(w);
    high += value * load(w + LANES);
#endif
}

template <int R, typename T, typename O>
void tile(const T* x, int64_t inputs, const T* panel, O* out, int64_t outputs, int width) {
    floats low[R] = {}, high[R] = {};
    for (int64_t first = 0; first < inputs; first += PART) {
        const int64_t end = std::min(inputs, first + PART);
        floats a[R] = {}, b[R] = {};
        for (int64_t k = first; k < end; k += STEP<T>)
            for (int r = 0; r < R; r++) step(a[r], b[r], x + r * inputs + k, panel + k * PANEL);
        for (int r = 0; r < R; r++) low[r] += a[r], high[r] += b[r];
    }
    for (int r = 0; r < R; r++) {
        O* row = out + r * outputs;
        if (width == PANEL) {
            store(row, low[r]);
            store(row + LANES, high[r]);
        } else {
            float sums[PANEL];
            store(sums, low[r]);
            store(sums + LANES, high[r]);
            for (int i = 0; i < width; i++) narrow(row + i, sums[i]);
        }
    }
}

template <typename T, typename O>
void product(const T* x, int64_t rows, int64_t inputs, const T* packed, int64_t outputs, O* out) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, passes = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(static)
    for (int64_t task = 0; task < panels * passes; task++) {
        const int64_t n = task % panels;
        const T* panel = packed + n * inputs * PANEL;
        const int width = std::min<int64_t>(PANEL, outputs - n * PANEL);
        const int64_t end = std::min(rows, (task / panels + 1) * ROWS);
        int64_t m = task / panels * ROWS;
#define ADVANCE(R)                                                                                \
    tile<R>(x + m * inputs, inputs, panel, out + m * outputs + n * PANEL, outputs, width), m += R
        while (m + TILE <= end) ADVANCE(TILE);
        if constexpr (TILE > 8)
            if (m + 8 <= end) ADVANCE(8);
        if (m + 4 <= end) ADVANCE(4);
        if (m + 2 <= end) ADVANCE(2);
        if (m < end) ADVANCE(1);
#undef ADVANCE
    }
}

template <typename T>
void pack(const T* weight, int64_t outputs, int64_t inputs, int64_t padded, T* packed) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < panels; n++)
        for (int64_t k = 0; k < padded; k++)
            for (int i = 0; i < PANEL; i++) {
                const int64_t row = n * PANEL + i, group = k / STEP<T>;
                T value{};
                if (row < outputs && k < inputs) value = weight[row * inputs + k];
                packed[(n * padded + group * STEP<T>) * PANEL + i * STEP<T> + k % STEP<T>] = value;
            }
}

}  // namespace

// What a packed weight is made for: the multiples of outputs and inputs.
extern "C" int kvloom_linear_panel() { return PANEL; }
extern "C" int kvloom_linear_pair() { return PAIR; }

// weight [outputs, inputs] to `packed` [panels, padded, PANEL], inputs padded with zeros to a multiple of a pair.
extern "C" void kvloom_linear_pack(const void* weight, int is_bf16, int64_t outputs, int64_t inputs, int64_t padded,
                                   void* packed) {
    if (is_bf16)
        pack((const bf16*)weight, outputs, inputs, padded, (bf16*)packed);
    else
        pack((const float*)weight, outputs, inputs, padded, (float*)packed);
}

// x [rows, inputs] (padded) to out [rows, outputs].
extern "C" void kvloom_linear(const void* x, int is_bf16, int64_t rows, int64_t inputs, const void* packed,
                              int64_t outputs, void* out, int out_bf16) {
    if (!is_bf16)
        product((const float*)x, rows, inputs, (const float*)packed, outputs, (float*)out);
    else if (out_bf16)
        product((const bf16*)x, rows, inputs, (const bf16*)packed, outputs, (bf16*)out);
    else
        product((const bf16*)x, rows, inputs, (const bf16*)packed, outputs, (float*)out);
}
