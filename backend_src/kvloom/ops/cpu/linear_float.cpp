// Products with weights in fp32 and bf16.
#include "activation.h"
#include "linear.h"
#include "replay.h"

namespace {

// The number of inputs per accumulator. Adding partial sums has about half the rounding error of one long sum. With
// bf16 that is negligible.
template <typename T>
constexpr int64_t PART = std::is_same_v<T, bf16> ? INT64_MAX / 2 : 192;

// Prefetches weights into the L2 cache, from `at` on, `stride` bytes per step.
struct Ahead {
    const char* at;
    int64_t stride;
};

template <typename T>
constexpr int64_t STEP_BYTES = PANEL * STEP<T> * sizeof(T);

// The CPU's own prefetcher is better with fewer rows but falls behind with more.
constexpr int FETCHED_ROWS = 8;
constexpr int64_t FETCH_AHEAD = 8192;  // bytes, if a panel is read once

// How to store the sums of a panel's two halves. OUTPUTS is the number of results per panel; the last may have fewer.
struct Plain {
    static constexpr int64_t OUTPUTS = PANEL;

    template <typename O>
    static void store_row(O* out, floats low, floats high, int64_t width) {
        if (width >= OUTPUTS) {
            store(out, low);
            store(out + LANES, high);
            return;
        }
        float sums[PANEL];
        store(sums, low);
        store(sums + LANES, high);
        for (int64_t i = 0; i < width; i++) narrow(out + i, sums[i]);
    }
};

// The halves are gate and up.
struct Gated {
    static constexpr int64_t OUTPUTS = LANES;

    template <typename O>
    static void store_row(O* out, floats gate, floats up, int64_t width) {
        const floats gated = silu_mul_of<O>(gate, up);
        if (width >= OUTPUTS) return store(out, gated);
        float results[LANES];
        store(results, gated);
        for (int64_t i = 0; i < width; i++) narrow(out + i, results[i]);
    }
};

// Not inlined, because tiles in the same function would compete for registers.
template <typename Form, int R, bool FETCH, typename T, typename O>
__attribute__((noinline)) void tile(const T* x, int64_t inputs, const T* panel, O* out, int64_t outputs, int64_t width,
                                    Ahead ahead) {
    floats low[R] = {}, high[R] = {};
    for (int64_t first = 0; first < inputs; first += PART<T>) {
        const int64_t end = std::min(inputs, first + PART<T>);
        floats a[R] = {}, b[R] = {};
        for (int64_t k = first; k < end; k += STEP<T>) {
            if (FETCH) {
                __builtin_prefetch(ahead.at, 0, 2);
                if (STEP_BYTES<T> > 64) __builtin_prefetch(ahead.at + 64, 0, 2);
                ahead.at += ahead.stride;
            }
            for (int r = 0; r < R; r++) step(a[r], b[r], x + r * inputs + k, panel + k * PANEL);
        }
        for (int r = 0; r < R; r++) low[r] += a[r], high[r] += b[r];
    }
    for (int r = 0; r < R; r++) Form::store_row(out + r * outputs, low[r], high[r], width);
}

template <typename Form, typename T, typename O>
void product(const T* x, int64_t rows, int64_t inputs, const T* packed, int64_t outputs, O* out) {
    const int64_t bytes = inputs * PANEL * sizeof(T), panels = (outputs + Form::OUTPUTS - 1) / Form::OUTPUTS;
    for_panels(rows, panels, [&](int64_t n, int64_t first, int64_t end) {
        const T* panel = packed + n * inputs * PANEL;
        const int64_t count = end - first, tiles = (count + TILE - 1) / TILE;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t m = first + count * t / tiles, next = first + count * (t + 1) / tiles;
            Ahead ahead = {(const char*)panel + FETCH_AHEAD, STEP_BYTES<T>};
            if (tiles > 1)  // each tile prefetches its share of the next panel
                ahead = {(const char*)panel + bytes + bytes * (m - first) / count, STEP_BYTES<T> * (next - m) / count};
            const auto work = [&](auto tile_rows, auto fetch) {
                const int64_t column = n * Form::OUTPUTS;
                tile<Form, tile_rows, fetch>(x + m * inputs, inputs, panel, out + m * outputs + column, outputs,
                                             outputs - column, ahead);
            };
            with_constant<TILE>(next - m, [&](auto tile_rows) {
                constexpr bool MAY_FETCH = 2 * tile_rows >= TILE;  // smaller tiles are alone
                if (MAY_FETCH && rows >= FETCHED_ROWS)
                    work(tile_rows, std::bool_constant<MAY_FETCH>());
                else
                    work(tile_rows, std::false_type());
            });
        }
    });
}

// The place of weight [row, k] in `packed`. `row` counts the rows of panels.
template <typename T>
int64_t place(int64_t row, int64_t k, int64_t padded) {
    const int64_t group = k / STEP<T> * STEP<T>;
    return (row / PANEL * padded + group) * PANEL + row % PANEL * STEP<T> + k % STEP<T>;
}

// Copies the weights of `count` outputs to the panels' rows from `row` on, and pads with zeros.
template <typename T>
void pack_rows(const T* weight, int64_t count, int64_t row, int64_t lanes, int64_t inputs, int64_t padded, T* packed) {
    for (int64_t k = 0; k < padded; k++)
        for (int64_t i = 0; i < lanes; i++)
            packed[place<T>(row + i, k, padded)] = i < count && k < inputs ? weight[i * inputs + k] : T{};
}

template <typename T>
void pack(const T* weight, int64_t outputs, int64_t inputs, int64_t padded, bool gated, T* packed) {
    const int64_t width = gated ? outputs / 2 : outputs, lanes = gated ? LANES : PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < width; first += lanes) {
        const int64_t row = first / lanes * PANEL;
        pack_rows(weight + first * inputs, width - first, row, lanes, inputs, padded, packed);
        if (gated)
            pack_rows(weight + (width + first) * inputs, width - first, row + lanes, lanes, inputs, padded, packed);
    }
}

template <typename T>
void rows_of(const T* packed, const int64_t* ids, int64_t count, int64_t inputs, int64_t padded, float* out) {
#pragma omp parallel for schedule(static) if (count > 8)
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < inputs; k++) out[i * inputs + k] = widen(packed[place<T>(ids[i], k, padded)]);
}

}  // namespace

// The multiples to which a packed weight's outputs and inputs are padded.
extern "C" int kvloom_linear_panel() { return PANEL; }
extern "C" int kvloom_linear_pair() { return PAIR; }

// Packs weight [outputs, inputs] to `packed` [panels, padded, PANEL]. Inputs are padded with zeros to a multiple of a
// pair. In a gated weight the first half of the outputs are gates, and a panel has LANES of gate beside LANES of up.
extern "C" void kvloom_linear_pack(const void* weight, int is_bf16, int64_t outputs, int64_t inputs, int64_t padded,
                                   int gated, void* packed) {
    if (is_bf16)
        pack((const bf16*)weight, outputs, inputs, padded, gated, (bf16*)packed);
    else
        pack((const float*)weight, outputs, inputs, padded, gated, (float*)packed);
}

// Computes out [rows, outputs] from x [rows, inputs] (padded).
extern "C" void kvloom_linear(const void* x, int is_bf16, int64_t rows, int64_t inputs, const void* packed,
                              int64_t outputs, void* out, int out_bf16) {
    if (!is_bf16)
        product<Plain>((const float*)x, rows, inputs, (const float*)packed, outputs, (float*)out);
    else if (out_bf16)
        product<Plain>((const bf16*)x, rows, inputs, (const bf16*)packed, outputs, (bf16*)out);
    else
        product<Plain>((const bf16*)x, rows, inputs, (const bf16*)packed, outputs, (float*)out);
}
REPLAYED(kvloom_linear)

// The same with a gated weight. out [rows, outputs] has x's type and half of the weight's outputs.
extern "C" void kvloom_linear_gated(const void* x, int is_bf16, int64_t rows, int64_t inputs, const void* packed,
                                    int64_t outputs, void* out) {
    if (is_bf16)
        product<Gated>((const bf16*)x, rows, inputs, (const bf16*)packed, outputs, (bf16*)out);
    else
        product<Gated>((const float*)x, rows, inputs, (const float*)packed, outputs, (float*)out);
}
REPLAYED(kvloom_linear_gated)

// Copies rows `ids` of the weight to out, fp32 [count, inputs].
extern "C" void kvloom_linear_rows(const void* packed, int is_bf16, const int64_t* ids, int64_t count, int64_t inputs,
                                   int64_t padded, float* out) {
    if (is_bf16)
        rows_of((const bf16*)packed, ids, count, inputs, padded, out);
    else
        rows_of((const float*)packed, ids, count, inputs, padded, out);
}
REPLAYED(kvloom_linear_rows)
