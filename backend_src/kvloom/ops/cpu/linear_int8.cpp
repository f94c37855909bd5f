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

// The panels, shared out to threads: each has a run of its own, fetches its next panel while it multiplies, and helps
// others when it is done.
class Runs {
   public:
    Runs(int64_t threads, const Tiles& tiles, int64_t groups, const uint8_t* packed, int64_t outputs)
        : threads(threads),
          tiles(tiles),
          groups(groups),
          packed(packed),
          panels((outputs + PANEL - 1) / PANEL),
          passes((tiles.count + TOGETHER - 1) / TOGETHER),
          taken(threads) {}

    // Calls work(panel, tile, ahead) for some of them, in every thread of a parallel region.
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
        const int64_t bytes = panel_bytes(groups), pass = task / panels;
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
    const Tiles tiles;
    const int64_t groups;
    const uint8_t* packed;
    const int64_t panels;
    const int64_t passes;
    std::vector<Taken> taken;  // of each thread's run
};

template <typename T, typename O>
void product(const T* x, int64_t rows, int64_t width, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    const int64_t groups = inputs / GROUP, threads = omp_get_max_threads();
    const Tiles tiles(rows);
    Int8Rows rounded(tiles, groups);
    Runs runs(threads, tiles, groups, packed, outputs);
    const auto round = [&](int64_t row) { rounded.fill(row, x + row * width, width); };
    const auto multiply = [&](int64_t n, int64_t t, Ahead ahead) {
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
    if (rows == 1) round(0);  // sooner done than shared out
#pragma omp parallel num_threads(threads)
    {
        if (rows > 1) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) round(row);
        }
        runs.work_on_some(multiply);
    }
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
