// Products with weights of 4 or 8 bits in groups of GROUP inputs. Each group has its own scale.
//
// A group's integers are exact in bf16 and in fp32, so that nothing is rounded before its sum is scaled.
#include "groups_panels.h"
#include "replay.h"

namespace {

// The type in which rows are laid out, so that a step need not widen them.
template <typename T>
using Input = std::conditional_t<STEP<T> == 1, float, T>;

// Calls take(k, values) with a group's values in the form that `step` takes.
template <int BITS, typename T, typename F>
static inline __attribute__((always_inline)) void unpack(const uint8_t* values, F&& take) {
#if defined(__AVX512BF16__)
    static const uint16_t NUMBERS[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                         0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                         0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                         0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i numbers = _mm512_loadu_si512(NUMBERS);  // 0 to 15 in bf16, twice: an index has 5 bits
#endif
#pragma GCC unroll 4
    for (int64_t first = 0; first < GROUP; first += WORD<BITS>) {
        const words word = load_words(values + first / WORD<BITS> * sizeof(words));
#pragma GCC unroll 8
        for (int64_t k = first; k < first + WORD<BITS>; k += STEP<T>) {
            if constexpr (STEP<T> == 1) {
                take(k, value_of<BITS>(word, k));
#if defined(__AVX512BF16__)
            } else if constexpr (BITS == 4) {
                const __m512i index = _mm512_srli_epi16((__m512i)word, shift_of<4>(k));
                take(k, (floats)_mm512_permutexvar_epi16(index, numbers));
#endif
            } else {
                const words even = (words)value_of<BITS>(word, k), odd = (words)value_of<BITS>(word, k + 1);
                take(k, (floats)(even >> 16 | odd));
            }
        }
    }
}

// R rows times a half of a panel.
template <int R, int BITS, typename T, typename O>
void tile(const T* x, const float* sums, const uint8_t* values, const uint8_t* heads, int64_t groups, Ahead& ahead,
          O* out, int64_t outputs, int64_t width) {
    floats totals[R] = {};
    for (int64_t g = 0; g < groups; g++, x += R * GROUP, sums += R) {
        ahead.fetch();
        floats part[R] = {};
        unpack<BITS, T>(values + g * VALUES<BITS>, [&](int64_t k, floats weights) {
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) step(part[r], x + r * GROUP + k, weights);
        });
        const uint8_t* head = heads + g * HEAD<BITS>;
        const floats scale = load_halves(head);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) totals[r] += part[r] * scale;
        if constexpr (BITS == 4) {
            const floats minimum = load_halves(head + 2 * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) totals[r] += minimum * sums[r];
        }
    }
    store_tile(out, outputs, totals, width);
}

// Calls work(panel, tile, ahead) for every panel and tile, in parallel. Each prefetches in every group of each half.
template <typename F>
static inline void for_panels_of_tiles(const Parts& tiles, int64_t row_bytes, int64_t groups, const uint8_t* packed,
                                       int64_t panel_bytes, int64_t outputs, F&& work) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, threads = omp_get_max_threads();
    const int64_t most = panels >= 4 * threads ? CACHED / (row_bytes * TILE) + 1 : ROWS / TILE;
    const int64_t passes = (tiles.count + most - 1) / most, tasks = panels * passes;
    // Few rows are memory-bound, which long runs suit. Many are compute-bound, and no core should wait for another.
    const int64_t chunk = tiles.count == 1 ? (tasks + threads - 1) / threads : 1;
    const int64_t lines = (panel_bytes + 63) / 64;
#pragma omp parallel for schedule(dynamic, chunk)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t panel = task % panels, pass = task / panels;
        const int64_t begin = pass * tiles.count / passes, end = (pass + 1) * tiles.count / passes;
        const int64_t next = panel + (chunk == 1 ? threads : 1), steps = 2 * groups * (end - begin);
        const int64_t share = next < panels ? (lines + steps - 1) / steps : 0;
        for (int64_t tile = begin; tile < end; tile++) {
            const int64_t from = (tile - begin) * 2 * groups * share * 64;
            work(panel, tile, Ahead{packed + next * panel_bytes + from, from < panel_bytes ? share : 0});
        }
    }
}

template <int BITS, typename T, typename O>
void product_of_halves(const T* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    const int64_t groups = inputs / GROUP, panel_bytes = groups * BLOCK<BITS>;
    const Parts tiles(rows);
    const Rows<BITS, Input<T>> laid(x, tiles, groups);
    const auto work = [&](int64_t n, int64_t t, Ahead ahead) {
        const uint8_t* panel = packed + n * panel_bytes;
        const int64_t first = tiles.first(t);
        with_constant<TILE>(tiles.size(t), [&](auto size) {
            for (int half = 0; half < 2; half++) {
                const int64_t column = n * PANEL + half * LANES;
                tile<size, BITS>(laid.values(first), laid.sums(first), panel + values_at<BITS>(half, 0, groups),
                                 panel + head_at<BITS>(half, 0, groups), groups, ahead, out + first * outputs + column,
                                 outputs, outputs - column);
            }
        });
    };
    for_panels_of_tiles(tiles, inputs * sizeof(Input<T>), groups, packed, panel_bytes, outputs, work);
}

template <int BITS, typename T, typename O>
void product(const T* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    if constexpr (LANES == 8)
        product_of_panels<BITS>(x, rows, inputs, packed, outputs, out);
    else
        product_of_halves<BITS>(x, rows, inputs, packed, outputs, out);
}

template <int BITS>
void pack(const uint8_t* values, const uint16_t* scales, const uint16_t* minima, int64_t outputs, int64_t inputs,
          uint8_t* packed) {
    const int64_t panels = (outputs + PANEL - 1) / PANEL, groups = inputs / GROUP;
    std::memset(packed, 0, panels * groups * BLOCK<BITS>);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < panels; n++)
        for (int64_t row = n * PANEL; row < std::min(outputs, (n + 1) * PANEL); row++)
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* panel = packed + n * groups * BLOCK<BITS>;
                const int64_t lane = row % PANEL;
                uint8_t* head = panel + head_at<BITS>(lane / LANES, g, groups) + 2 * (lane % LANES);
                std::memcpy(head, scales + row * groups + g, 2);
                if (BITS == 4) std::memcpy(head + 2 * LANES, minima + row * groups + g, 2);
                for (int64_t k = 0; k < GROUP; k++) {
                    uint8_t* at = (uint8_t*)word_at<BITS>(panel, lane, g, k, groups);
                    uint32_t word;
                    std::memcpy(&word, at, 4);
                    word |= (uint32_t)values[row * inputs + g * GROUP + k] << shift_of<BITS>(k);
                    std::memcpy(at, &word, 4);
                }
            }
}

template <int BITS>
void rows_of(const uint8_t* packed, const int64_t* ids, int64_t count, int64_t inputs, int64_t width, float* out) {
    const int64_t groups = inputs / GROUP;
#pragma omp parallel for schedule(static) if (count > 8)
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < width; k++) {
            const int64_t lane = ids[i] % PANEL;
            const uint8_t* panel = packed + ids[i] / PANEL * groups * BLOCK<BITS>;
            const uint8_t* head = panel + head_at<BITS>(lane / LANES, k / GROUP, groups);
            uint32_t word;
            std::memcpy(&word, word_at<BITS>(panel, lane, k / GROUP, k % GROUP, groups), 4);
            const floats value = value_of<BITS>(words{} + word, k % GROUP);
            const floats scale = load_halves(head);
            float minimum = 0.0f;
            if (BITS == 4) minimum = load_halves(head + 2 * LANES)[lane % LANES];
            out[i * width + k] = value[0] * scale[lane % LANES] + minimum;
        }
}

}  // namespace

// Packs values [outputs, inputs], one byte each, with scales and (4 bits only) minima, fp16 [outputs, groups].
extern "C" void kvloom_groups_pack(int bits, const uint8_t* values, const uint16_t* scales, const uint16_t* minima,
                                   int64_t outputs, int64_t inputs, uint8_t* packed) {
    if (bits == 4)
        pack<4>(values, scales, minima, outputs, inputs, packed);
    else
        pack<8>(values, scales, minima, outputs, inputs, packed);
}

// Computes out [rows, outputs] from x [rows, inputs].
extern "C" void kvloom_groups(int bits, const void* x, int is_bf16, int64_t rows, int64_t inputs, const uint8_t* packed,
                              int64_t outputs, void* out, int out_bf16) {
#define CALL(T, O)                                                                                 \
    bits == 4 ? product<4>((const T*)x, rows, inputs, packed, outputs, (O*)out)                    \
              : product<8>((const T*)x, rows, inputs, packed, outputs, (O*)out)
    if (!is_bf16)
        CALL(float, float);
    else if (out_bf16)
        CALL(bf16, bf16);
    else
        CALL(bf16, float);
#undef CALL
}
REPLAYED(kvloom_groups)

// Copies rows `ids` of the weight to out, fp32 [count, width]. inputs is the width padded to a multiple of a group.
extern "C" void kvloom_groups_rows(int bits, const uint8_t* packed, const int64_t* ids, int64_t count, int64_t inputs,
                                   int64_t width, float* out) {
    if (bits == 4)
        rows_of<4>(packed, ids, count, inputs, width, out);
    else
        rows_of<8>(packed, ids, count, inputs, width, out);
}
REPLAYED(kvloom_groups_rows)
