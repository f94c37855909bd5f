// Products of INT8 rows and INT8 weights. Both have one scale per group of G inputs (32 in llama.cpp's Q8_0):
// y = sum over groups of s_x s_w (q_x q_w).
//
// A group's scales cost two multiplications, its integers cost G / 4.
#include "activation.h"
#include "int8.h"
#include "replay.h"

namespace {

// A panel has values [2 halves, groups, G / QUAD, LANES, QUAD] plus OFFSET, then fp16 scales [2, groups, LANES].
template <int64_t G>
struct Panel {
    static constexpr int64_t VALUES = G * LANES;

    int64_t groups;

    int64_t bytes() const { return groups * PANEL * (G + 2); }
    int64_t values_at(int64_t half, int64_t g) const { return (half * groups + g) * VALUES; }
    int64_t value_at(int64_t lane, int64_t g, int64_t k) const {
        return values_at(lane / LANES, g) + (k / QUAD * LANES + lane % LANES) * QUAD + k % QUAD;
    }
    int64_t scales_at(int64_t half, int64_t g) const { return 2 * groups * VALUES + (half * groups + g) * LANES * 2; }
};

// R rows times a half of a panel. Not inlined, so that all users share one copy.
template <int64_t G, int R, typename O>
__attribute__((noinline)) void tile(const int8_t* x, const Scale* scales, const uint8_t* values, const uint8_t* heads,
                                    int64_t groups, Ahead ahead, O* out, int64_t outputs, int64_t width) {
    floats totals[R] = {};
    for (int64_t g = 0; g < groups; g++, x += R * G, scales += R) {
        ahead.fetch();
        ints sums[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = ints{} + scales[r].offset;
#pragma GCC unroll 8
        for (int64_t k = 0; k < G; k += QUAD) {
            const ints weights = load_ints(values + g * Panel<G>::VALUES + k * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) step(sums[r], weights, x + r * G + k);
        }
        const floats scale = load_halves(heads + g * LANES * 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
            totals[r] = fused(__builtin_convertvector(sums[r], floats) * scale, floats{} + scales[r].scale, totals[r]);
    }
    store_tile(out, outputs, totals, width);
}

// How to store the results of a panel's halves. half(number, out, outputs, width) computes one half.
// OUTPUTS is the number of results per panel; the last may have fewer.
struct Plain {
    static constexpr int64_t OUTPUTS = PANEL;

    template <int R, typename O, typename F>
    static void store_tiles(F&& half, O* out, int64_t outputs, int64_t width) {
        half(0, out, outputs, width);
        half(1, out + LANES, outputs, width - LANES);
    }
};

// The halves are gate and up.
struct Gated {
    static constexpr int64_t OUTPUTS = LANES;

    template <int R, typename O, typename F>
    static void store_tiles(F&& half, O* out, int64_t outputs, int64_t width) {
        float gates[R * LANES], ups[R * LANES];
        half(0, gates, LANES, LANES);
        half(1, ups, LANES, LANES);
        floats gated[R];
        for (int r = 0; r < R; r++) gated[r] = silu_mul_of<O>(load(gates + r * LANES), load(ups + r * LANES));
        store_tile(out, outputs, gated, width);
    }
};

// Distributes panels to threads. Each thread has its own run of panels, prefetches its next panel while it multiplies,
// and helps others when it is done.
class Runs {
   public:
    Runs(int64_t threads, const Parts& tiles, int64_t groups, const uint8_t* packed, int64_t bytes, int64_t panels)
        : threads(threads),
          tiles(tiles),
          groups(groups),
          packed(packed),
          bytes(bytes),
          panels(panels),
          passes((tiles.count + TOGETHER - 1) / TOGETHER),
          taken(threads) {}

    // Calls work(panel, tile, ahead) for some panels, in every thread of a parallel region.
    template <typename F>
    void work_on_some(F&& work) {
        const auto start = [&](int64_t owner) { return panels * passes * owner / threads; };
        work_on_runs(taken, [&](int64_t owner) { return start(owner + 1) - start(owner); },
                     [&](int64_t owner, int64_t number) {
                         const int64_t task = start(owner) + number;
                         run(task, task + 1 < start(owner + 1), work);
                     });
    }

   private:
    static constexpr int64_t TOGETHER = ROWS / TILE;  // tiles per pass over the panels

    template <typename F>
    void run(int64_t task, bool has_next, F&& work) const {
        const int64_t pass = task / panels;
        const int64_t begin = pass * tiles.count / passes, end = (pass + 1) * tiles.count / passes;
        const uint8_t* next = packed + (task + 1) % panels * bytes;
        const int64_t lines = has_next ? (bytes + 63) / 64 : 0, steps = 2 * groups * (end - begin);
        const int64_t share = (lines + steps - 1) / steps;
        for (int64_t tile = begin; tile < end; tile++) {
            const int64_t from = (tile - begin) * 2 * groups * share;
            work(task % panels, tile, Ahead{next + from * 64, from < lines ? share : 0});
        }
    }

    const int64_t threads;
    const Parts tiles;
    const int64_t groups;
    const uint8_t* packed;
    const int64_t bytes;  // bytes per panel
    const int64_t panels;
    const int64_t passes;
    std::vector<Taken> taken;  // how many panels of each thread's run are taken
};

template <int64_t G, typename Form, typename T, typename O>
void product(const T* x, int64_t rows, int64_t width, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    const int64_t groups = inputs / G, threads = omp_get_max_threads();
    const Panel<G> at{groups};
    const Parts tiles(rows);
    Int8Rows<G> rounded(tiles, groups);
    Runs runs(threads, tiles, groups, packed, at.bytes(), (outputs + Form::OUTPUTS - 1) / Form::OUTPUTS);
    const auto round = [&](int64_t row) { rounded.fill(row, x + row * width, width); };
    const auto multiply = [&](int64_t n, int64_t t, Ahead ahead) {
        const int64_t first = tiles.first(t), column = n * Form::OUTPUTS;
        const uint8_t* panel = packed + n * at.bytes();
        with_constant<TILE>(tiles.size(t), [&](auto size) {
            const auto half = [&](int64_t number, auto* sums, int64_t stride, int64_t left) {
                tile<G, size>(rounded.values(first), rounded.scales(first), panel + at.values_at(number, 0),
                              panel + at.scales_at(number, 0), groups, ahead.after(number * groups), sums, stride,
                              left);
            };
            Form::template store_tiles<size>(half, out + first * outputs + column, outputs, outputs - column);
        });
    };
    if (rows == 1) round(0);  // faster than distributing it
#pragma omp parallel num_threads(threads)
    {
        if (rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) round(row);
        }
        runs.work_on_some(multiply);
    }
}

template <int64_t G>
void pack(const int8_t* values, const uint16_t* scales, int64_t outputs, int64_t inputs, bool gated, uint8_t* packed) {
    const int64_t groups = inputs / G, panels = (outputs + PANEL - 1) / PANEL, gates = outputs / 2;
    const Panel<G> at{groups};
    std::memset(packed, 0, panels * at.bytes());
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < outputs; row++) {
        int64_t n = row / PANEL, lane = row % PANEL;
        if (gated) {
            const int64_t half = row >= gates, output = row - half * gates;
            n = output / LANES, lane = half * LANES + output % LANES;
        }
        uint8_t* panel = packed + n * at.bytes();
        for (int64_t g = 0; g < groups; g++) {
            std::memcpy(panel + at.scales_at(lane / LANES, g) + 2 * (lane % LANES), scales + row * groups + g, 2);
            for (int64_t k = 0; k < G; k++)
                panel[at.value_at(lane, g, k)] = values[row * inputs + g * G + k] + OFFSET;
        }
    }
}

template <int64_t G>
void rows_of(const uint8_t* packed, const int64_t* ids, int64_t count, int64_t inputs, int64_t width, float* out) {
    const Panel<G> at{inputs / G};
#pragma omp parallel for schedule(static) if (count > 8)
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* panel = packed + ids[i] / PANEL * at.bytes();
        const int64_t lane = ids[i] % PANEL;
        for (int64_t k = 0; k < width; k++) {
            const floats scale = load_halves(panel + at.scales_at(lane / LANES, k / G));
            const int8_t value = panel[at.value_at(lane, k / G, k % G)] - OFFSET;
            out[i * width + k] = value * scale[lane % LANES];
        }
    }
}

// Calls work(constant) with the group size.
template <typename F>
void with_group(int64_t group, F&& work) {
    if (group == 64)
        work(std::integral_constant<int64_t, 64>());
    else
        work(std::integral_constant<int64_t, 32>());
}

}  // namespace

// Packs values [outputs, inputs] and fp16 scales [outputs, inputs / group] to `packed`. group is 32 or 64. In a gated
// weight the first half of the outputs are gates, and a panel has LANES of gate beside LANES of up.
extern "C" void kvloom_int8_pack(int64_t group, const int8_t* values, const uint16_t* scales, int64_t outputs,
                                 int64_t inputs, int gated, uint8_t* packed) {
    with_group(group, [&](auto size) { pack<size>(values, scales, outputs, inputs, gated, packed); });
}

// Computes out [rows, outputs] from x [rows, width]. inputs is the width padded to a multiple of a group.
extern "C" void kvloom_int8(int64_t group, const void* x, int is_bf16, int64_t rows, int64_t width, int64_t inputs,
                            const uint8_t* packed, int64_t outputs, void* out, int out_bf16) {
    with_group(group, [&](auto size) {
        if (!is_bf16)
            product<size, Plain>((const float*)x, rows, width, inputs, packed, outputs, (float*)out);
        else if (out_bf16)
            product<size, Plain>((const bf16*)x, rows, width, inputs, packed, outputs, (bf16*)out);
        else
            product<size, Plain>((const bf16*)x, rows, width, inputs, packed, outputs, (float*)out);
    });
}
REPLAYED(kvloom_int8)

// The same with a gated weight. out [rows, outputs] has x's type and half of the weight's outputs.
extern "C" void kvloom_int8_gated(int64_t group, const void* x, int is_bf16, int64_t rows, int64_t width,
                                  int64_t inputs, const uint8_t* packed, int64_t outputs, void* out) {
    with_group(group, [&](auto size) {
        if (is_bf16)
            product<size, Gated>((const bf16*)x, rows, width, inputs, packed, outputs, (bf16*)out);
        else
            product<size, Gated>((const float*)x, rows, width, inputs, packed, outputs, (float*)out);
    });
}
REPLAYED(kvloom_int8_gated)

// Copies rows `ids` of a weight that is not gated to out, fp32 [count, width].
extern "C" void kvloom_int8_rows(int64_t group, const uint8_t* packed, const int64_t* ids, int64_t count,
                                 int64_t inputs, int64_t width, float* out) {
    with_group(group, [&](auto size) { rows_of<size>(packed, ids, count, inputs, width, out); });
}
REPLAYED(kvloom_int8_rows)
