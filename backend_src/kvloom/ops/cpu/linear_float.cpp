// Products with weights in fp32 and bf16.
#include "linear.h"
#include "replay.h"

namespace {

// Inputs that are added up in one accumulator. Sums of sums round about half as much as one long sum does; beside the
// rounding of bf16 that is nothing.
template <typename T>
constexpr int64_t PART = std::is_same_v<T, bf16> ? INT64_MAX / 2 : 192;

template <int R, typename T, typename O>
void tile(const T* x, int64_t inputs, const T* panel, O* out, int64_t outputs, int width) {
    floats low[R] = {}, high[R] = {};
    for (int64_t first = 0; first < inputs; first += PART<T>) {
        const int64_t end = std::min(inputs, first + PART<T>);
        floats a[R] = {}, b[R] = {};
        for (int64_t k = first; k < end; k += STEP<T>)
            for (int r = 0; r < R; r++) step(a[r], b[r], x + r * inputs + k, panel + k * PANEL);
        for (int r = 0; r < R; r++) low[r] += a[r], high[r] += b[r];
    }
    for (int r = 0; r < R; r++) store_row(out + r * outputs, low[r], high[r], width);
}

template <typename T, typename O>
void product(const T* x, int64_t rows, int64_t inputs, const T* packed, int64_t outputs, O* out) {
    for_panels(rows, outputs, [&](int64_t n, int width, int64_t first, int64_t end) {
        for_tiles(first, end, [&](auto count, int64_t m) {
            tile<count>(x + m * inputs, inputs, packed + n * inputs * PANEL, out + m * outputs + n * PANEL, outputs,
                        width);
        });
    });
}

// Where weight [row, k] lies in `packed`.
template <typename T>
int64_t place(int64_t row, int64_t k, int64_t padded) {
    const int64_t group = k / STEP<T> * STEP<T>;
    return (row / PANEL * padded + group) * PANEL + row % PANEL * STEP<T> + k % STEP<T>;
}

template <typename T>
void pack(const T* weight, int64_t outputs, int64_t inputs, int64_t padded, T* packed) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < panels; n++)
        for (int64_t k = 0; k < padded; k++)
            for (int64_t row = n * PANEL; row < (n + 1) * PANEL; row++)
                packed[place<T>(row, k, padded)] = row < outputs && k < inputs ? weight[row * inputs + k] : T{};
}

template <typename T>
void rows_of(const T* packed, const int64_t* ids, int64_t count, int64_t inputs, int64_t padded, float* out) {
#pragma omp parallel for schedule(static) if (count > 8)
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < inputs; k++) out[i * inputs + k] = widen(packed[place<T>(ids[i], k, padded)]);
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
REPLAYED(kvloom_linear)

// Rows `ids` of the weight, to out fp32 [count, inputs].
extern "C" void kvloom_linear_rows(const void* packed, int is_bf16, const int64_t* ids, int64_t count, int64_t inputs,
                                   int64_t padded, float* out) {
    if (is_bf16)
        rows_of((const bf16*)packed, ids, count, inputs, padded, out);
    else
        rows_of((const float*)packed, ids, count, inputs, padded, out);
}
REPLAYED(kvloom_linear_rows)
