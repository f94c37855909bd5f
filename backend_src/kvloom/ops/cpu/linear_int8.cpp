// Products of INT8 rows with INT8 weights: y = (x / sx)(W / sw)^T * sx * sw, a scale sx per row and sw per output.
//
// Sums of integers are exact, so that every machine and every number of rows gives the same.
#include <cmath>
#include <vector>

#include "linear.h"
#include "replay.h"

namespace {

constexpr int64_t QUAD = 4;  // inputs that one step takes

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline ints load_ints(const void* p) {
    ints x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Adds the products of four inputs, the same for all lanes, with four weights in each lane.
#if defined(__AVX512VNNI__)
constexpr int OFFSET = 128;  // of an input: the instruction multiplies unsigned with signed bytes
static inline void step(ints& sum, ints x, ints w) { sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)w); }
#else
constexpr int OFFSET = 0;
static inline void step(ints& sum, ints x, ints w) {
#if defined(__AVX2__) && !LANES_512
    typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
    const auto even = [](ints v) { return (__m256i)((shorts)v << 8 >> 8); };
    const auto odd = [](ints v) { return (__m256i)((shorts)v >> 8); };
    sum += (ints)_mm256_madd_epi16(even(x), even(w)) + (ints)_mm256_madd_epi16(odd(x), odd(w));
#else
    for (int shift = 24; shift >= 0; shift -= 8) sum += (x << shift >> 24) * (w << shift >> 24);
#endif
}
#endif

// A panel: weights [inputs / QUAD, PANEL, QUAD], then what the offset adds to each output, then scales.
int64_t panel_bytes(int64_t inputs) { return inputs * PANEL + PANEL * (sizeof(int32_t) + sizeof(float)); }

template <int R, typename O>
void tile(const int8_t* x, const float* scales, int64_t inputs, const int8_t* panel, O* out, int64_t outputs,
          int width) {
    const int8_t* tail = panel + inputs * PANEL;
    ints low[R], high[R];
    for (int r = 0; r < R; r++) low[r] = load_ints(tail), high[r] = load_ints(tail + 4 * LANES);
    for (int64_t k = 0; k < inputs; k += QUAD) {
        const ints a = load_ints(panel + k * PANEL), b = load_ints(panel + k * PANEL + 4 * LANES);
        for (int r = 0; r < R; r++) {
            int32_t quad;
            std::memcpy(&quad, x + r * inputs + k, sizeof quad);
            step(low[r], ints{} + quad, a);
            step(high[r], ints{} + quad, b);
        }
    }
    const float* by = (const float*)(tail + 4 * PANEL);
    for (int r = 0; r < R; r++)
        store_row(out + r * outputs, __builtin_convertvector(low[r], floats) * (scales[r] * load(by)),
                  __builtin_convertvector(high[r], floats) * (scales[r] * load(by + LANES)), width);
}

typedef int8_t bytes __attribute__((vector_size(LANES)));

// The nearest integers, ties to even, of numbers up to 2^22: adding 1.5 * 2^23 leaves no fraction.
static inline ints nearest(floats x) { return (ints)(x + 12582912.0f) - 0x4b400000; }

// Rounds a row to integers of at most 127, to nearest, ties to even; returns its scale.
template <typename T>
float quantize(const T* x, int64_t width, int64_t inputs, int8_t* out) {
    // NaN is larger than nothing: it has to reach the scale, and the row with it, on a way of its own
    floats most = {}, poison = {};
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) {
        const floats v = load(x + k), size = (floats)((words)v & 0x7fffffff);
        most = size > most ? size : most;
        poison += v * 0.0f;
    }
    float largest = max_of(most);
    for (; k < width; k++) {
        largest = std::max(largest, std::fabs(widen(x[k])));
        poison[0] += widen(x[k]) * 0.0f;
    }
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (k = 0; k + LANES <= width; k += LANES) {
        const bytes rounded = __builtin_convertvector(nearest(load(x + k) * inverse) + OFFSET, bytes);
        std::memcpy(out + k, &rounded, sizeof rounded);
    }
    for (; k < width; k++) out[k] = (int8_t)(nearest(floats{} + widen(x[k]) * inverse)[0] + OFFSET);
    std::fill(out + width, out + inputs, (int8_t)OFFSET);
    return scale + sum_of(poison);
}

template <typename T, typename O>
void product(const T* x, int64_t rows, int64_t width, int64_t inputs, const int8_t* packed, int64_t outputs, O* out) {
    std::vector<int8_t> quantized(rows * inputs);
    std::vector<float> scales(rows);
#pragma omp parallel for schedule(static) if (rows > 16)
    for (int64_t m = 0; m < rows; m++) scales[m] = quantize(x + m * width, width, inputs, &quantized[m * inputs]);
    for_panels(rows, outputs, [&](int64_t n, int panel_width, int64_t first, int64_t end) {
        for_tiles(first, end, [&](auto count, int64_t m) {
            tile<count>(&quantized[m * inputs], &scales[m], inputs, packed + n * panel_bytes(inputs),
                        out + m * outputs + n * PANEL, outputs, panel_width);
        });
    });
}

}  // namespace


// values [outputs, width] and scales [outputs] to `packed`, inputs padded with zeros to a multiple of 4.
extern "C" void kvloom_int8_pack(const int8_t* values, const float* scales, int64_t outputs, int64_t width,
                                 int64_t inputs, int8_t* packed) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    std::memset(packed, 0, panels * panel_bytes(inputs));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < outputs; row++) {
        int8_t* panel = packed + row / PANEL * panel_bytes(inputs);
        const int64_t lane = row % PANEL;
        int32_t sum = 0;
        for (int64_t k = 0; k < width; k++) {
            panel[k / QUAD * QUAD * PANEL + lane * QUAD + k % QUAD] = values[row * width + k];
            sum += values[row * width + k];
        }
        const int32_t offset = -OFFSET * sum;
        std::memcpy(panel + inputs * PANEL + 4 * lane, &offset, sizeof offset);
        std::memcpy(panel + inputs * PANEL + 4 * (PANEL + lane), scales + row, sizeof(float));
    }
}

// x [rows, width] to out [rows, outputs].
extern "C" void kvloom_int8(const void* x, int is_bf16, int64_t rows, int64_t width, int64_t inputs,
                            const int8_t* packed, int64_t outputs, void* out, int out_bf16) {
    if (!is_bf16)
        product((const float*)x, rows, width, inputs, packed, outputs, (float*)out);
    else if (out_bf16)
        product((const bf16*)x, rows, width, inputs, packed, outputs, (bf16*)out);
    else
        product((const bf16*)x, rows, width, inputs, packed, outputs, (float*)out);
}
REPLAYED(kvloom_int8)
