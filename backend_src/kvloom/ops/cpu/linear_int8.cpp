// Products of INT8 rows with INT8 weights, both in groups of GROUP inputs with a scale each (as llama.cpp's Q8_0):
// y = sum over groups of s_x s_w (q_x q_w).
#include "int8.h"
#include "replay.h"

namespace {

// A panel: values [2 halves, groups, GROUP / QUAD, LANES, QUAD], offset by OFFSET, then fp16 scales [2, groups, LANES].
constexpr int64_t VALUES = GROUP * LANES;
int64_t panel_bytes(int64_t groups) { return groups * PANEL * (GROUP + 2); }
int64_t value_at(int64_t lane, int64_t g, int64_t k, int64_t groups) {
    return (lane / LANES * groups + g) * VALUES + (k / QUAD * LANES + lane % LANES) * QUAD + k % QUAD;
}
int64_t scales_at(int64_t half, int64_t g, int64_t groups) {
    return 2 * groups * VALUES + (half * groups + g) * LANES * 2;
}

// R rows times a half of a panel.
template <int R, typename O>
void tile(const int8_t* x, const Scale* scales, const uint8_t* values, const uint8_t* heads, int64_t groups,
          Ahead& ahead, O* out, int64_t outputs, int64_t width) {
    floats totals[R] = {};
    for (int64_t g = 0; g < groups; g++, x += R * GROUP, scales += R) {
        ahead.fetch();
        ints sums[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = ints{} + scales[r].offset;
#pragma GCC unroll 8
        for (int64_t k = 0; k < GROUP; k += QUAD) {
            const ints weights = load_ints(values + g * VALUES + k * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) step(sums[r], weights, x + r * GROUP + k);
        }
        const floats scale = load_halves(heads + g * LANES * 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) totals[r] += __builtin_convertvector(sums[r], floats) * scale * scales[r].scale;
    }
    store_tile(out, outputs, totals, width);
}

template <typename T, typename O>
void product(const T* x, int64_t rows, int64_t width, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    const int64_t groups = inputs / GROUP;
    const Tiles tiles(rows);
    const Int8Rows rounded(x, tiles, width, groups);
    const auto work = [&](int64_t n, int64_t t, Ahead ahead) {
        const uint8_t* panel = packed + n * panel_bytes(groups);
        const int64_t first = tiles.first(t);
        with_constant(tiles.size(t), [&](auto size) {
            for (int half = 0; half < 2; half++) {
                const int64_t column = n * PANEL + half * LANES;
                tile<size>(rounded.values(first), rounded.scales(first), panel + half * groups * VALUES,
                           panel + scales_at(half, 0, groups), groups, ahead, out + first * outputs + column, outputs,
                           outputs - column);
            }
        });
    };
    for_panels_of_tiles(tiles, inputs, groups, packed, panel_bytes(groups), outputs, work);
}

}  // namespace

// values [outputs, inputs] and scales in fp16 [outputs, groups] to `packed`.
extern "C" void kvloom_int8_pack(const int8_t* values, const uint16_t* scales, int64_t outputs, int64_t inputs,
                                 uint8_t* packed) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, groups = inputs / GROUP;
    std::memset(packed, 0, panels * panel_bytes(groups));
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < outputs; row++) {
        uint8_t* panel = packed + row / PANEL * panel_bytes(groups);
        const int64_t lane = row % PANEL;
        for (int64_t g = 0; g < groups; g++) {
            std::memcpy(panel + scales_at(lane / LANES, g, groups) + 2 * (lane % LANES), scales + row * groups + g, 2);
            for (int64_t k = 0; k < GROUP; k++)
                panel[value_at(lane, g, k, groups)] = values[row * inputs + g * GROUP + k] + OFFSET;
        }
    }
}

// x [rows, width] to out [rows, outputs]; inputs is the width up to a multiple of a group.
extern "C" void kvloom_int8(const void* x, int is_bf16, int64_t rows, int64_t width, int64_t inputs,
                            const uint8_t* packed, int64_t outputs, void* out, int out_bf16) {
    if (!is_bf16)
        product((const float*)x, rows, width, inputs, packed, outputs, (float*)out);
    else if (out_bf16)
        product((const bf16*)x, rows, width, inputs, packed, outputs, (bf16*)out);
    else
        product((const bf16*)x, rows, width, inputs, packed, outputs, (float*)out);
}
REPLAYED(kvloom_int8)

// Rows `ids` of the weight, to out fp32 [count, width].
extern "C" void kvloom_int8_rows(const uint8_t* packed, const int64_t* ids, int64_t count, int64_t inputs,
                                 int64_t width, float* out) {
    const int64_t groups = inputs / GROUP;
#pragma omp parallel for schedule(static) if (count > 8)
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* panel = packed + ids[i] / PANEL * panel_bytes(groups);
        const int64_t lane = ids[i] % PANEL;
        for (int64_t k = 0; k < width; k++) {
            const floats scale = load_halves(panel + scales_at(lane / LANES, k / GROUP, groups));
            const int8_t value = panel[value_at(lane, k / GROUP, k % GROUP, groups)] - OFFSET;
            out[i * width + k] = value * scale[lane % LANES];
        }
    }
}
REPLAYED(kvloom_int8_rows)
