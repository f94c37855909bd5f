// Products with weights of 4 or 8 bits in groups of GROUP inputs, each group with a scale of its own.
//
// A group's integers are exact in bf16 and in fp32, so that nothing is lost before its sum is scaled. They are unpacked
// into the L1 cache once for all rows of a pass.
#include <vector>

#include "linear.h"
#include "replay.h"

namespace {

constexpr int64_t GROUP = 32;

// A panel's group: scales, minima (4 bits only) in fp16, then values: a word holds WORD inputs of one output. The low
// half has the even inputs, the high half the odd ones, so that both halves of a pair move together.
template <int BITS>
constexpr int64_t WORD = 32 / BITS;
template <int BITS>
constexpr int64_t HEAD = (BITS == 4 ? 2 : 1) * PANEL * 2;
template <int BITS>
constexpr int64_t BLOCK = HEAD<BITS> + PANEL * GROUP * BITS / 8;

template <int BITS>
constexpr int shift_of(int64_t k) {
    return k % 2 * 16 + k % WORD<BITS> / 2 * BITS;
}

typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline words load_words(const uint8_t* p) {
    words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// fp16 to fp32, whatever is finite: the exponent's bias is put right by a product.
static inline floats load_halves(const uint8_t* p) {
    halves h;
    std::memcpy(&h, p, sizeof h);
    const words bits = __builtin_convertvector(h, words);
    const floats magnitude = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)magnitude | (bits & 0x8000) << 16);
}

template <int BITS>
static inline floats value_of(words word, int64_t k) {
    if constexpr (BITS == 4)
        return __builtin_convertvector((ints)(word >> shift_of<4>(k) & 15), floats);
    else
        return __builtin_convertvector((ints)(word << (24 - shift_of<8>(k))) >> 24, floats);
}

// Calls take(half, k, values) with what `step` takes of a group's values, LANES outputs at a time.
template <int BITS, typename T, typename F>
static inline void unpack(const uint8_t* values, F&& take) {
#if defined(__AVX512BF16__)
    static const uint16_t NUMBERS[32] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                         0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                                         0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                         0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    const __m512i numbers = _mm512_loadu_si512(NUMBERS);  // 0 to 15 in bf16, twice: an index has 5 bits
#endif
    for (int64_t first = 0; first < GROUP; first += WORD<BITS>)
        for (int half = 0; half < 2; half++) {
            const words word = load_words(values + (first / WORD<BITS> * 2 + half) * sizeof(words));
            for (int64_t k = first; k < first + WORD<BITS>; k += STEP<T>) {
                if constexpr (STEP<T> == 1) {
                    take(half, k, value_of<BITS>(word, k));
#if defined(__AVX512BF16__)
                } else if constexpr (BITS == 4) {
                    const __m512i index = _mm512_srli_epi16((__m512i)word, shift_of<4>(k));
                    take(half, k, (floats)_mm512_permutexvar_epi16(index, numbers));
#endif
                } else {
                    const words even = (words)value_of<BITS>(word, k), odd = (words)value_of<BITS>(word, k + 1);
                    take(half, k, (floats)(even >> 16 | odd));
                }
            }
        }
}

// A group's scales and minima in fp32.
template <int BITS>
struct Scaling {
    floats scale[2], minimum[2];

    explicit Scaling(const uint8_t* head) {
        for (int half = 0; half < 2; half++) {
            scale[half] = load_halves(head + 2 * LANES * half);
            if (BITS == 4) minimum[half] = load_halves(head + 2 * (PANEL + LANES * half));
        }
    }

    // Adds a row's sums of a group to its totals [PANEL]; `inputs` is the sum of its inputs.
    void add(floats low, floats high, const float* inputs, float* totals) const {
        low = load(totals) + low * scale[0];
        high = load(totals + LANES) + high * scale[1];
        if constexpr (BITS == 4) {
            low += *inputs * minimum[0];
            high += *inputs * minimum[1];
        }
        store(totals, low);
        store(totals + LANES, high);
    }
};

// Adds a group's part to R rows' totals [R, PANEL]; sums [R, groups] are of the rows' inputs.
template <int R, int BITS, typename T>
void tile(const T* x, int64_t inputs, const T* unpacked, const Scaling<BITS>& scaling, const float* sums,
          int64_t groups, float* totals) {
    floats a[R] = {}, b[R] = {};
    for (int64_t k = 0; k < GROUP; k += STEP<T>)
        for (int r = 0; r < R; r++) step(a[r], b[r], x + r * inputs + k, unpacked + k * PANEL);
    for (int r = 0; r < R; r++) scaling.add(a[r], b[r], sums + r * groups, totals + r * PANEL);
}

// The same for one row, whose values need not wait in memory.
template <int BITS, typename T>
void row(const T* x, const uint8_t* block, const Scaling<BITS>& scaling, const float* sum, float* totals) {
    floats sums[2] = {};
    unpack<BITS, T>(block + HEAD<BITS>, [&](int half, int64_t k, floats values) { step(sums[half], x + k, values); });
    scaling.add(sums[0], sums[1], sum, totals);
}

template <typename T>
void sum_groups(const T* x, int64_t count, float* sums) {
#pragma omp parallel for schedule(static) if (count > 512)
    for (int64_t i = 0; i < count; i++) {
        floats sum = {};
        for (int64_t k = 0; k < GROUP; k += LANES) sum += load(x + i * GROUP + k);
        sums[i] = sum_of(sum);
    }
}

template <int BITS, typename T, typename O>
void product(const T* x, int64_t rows, int64_t inputs, const uint8_t* packed, int64_t outputs, O* out) {
    const int64_t groups = inputs / GROUP;
    std::vector<float> sums(BITS == 4 ? rows * groups : 0);
    if (BITS == 4) sum_groups(x, rows * groups, sums.data());
    for_panels(rows, outputs, [&](int64_t n, int width, int64_t first, int64_t end) {
        alignas(64) T unpacked[GROUP * PANEL];
        alignas(64) float totals[ROWS * PANEL];
        std::fill(totals, totals + (end - first) * PANEL, 0.0f);
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t* block = packed + (n * groups + g) * BLOCK<BITS>;
            const Scaling<BITS> scaling(block);
            if (end - first == 1) {
                row<BITS>(x + first * inputs + g * GROUP, block, scaling, sums.data() + first * groups + g, totals);
                continue;
            }
            unpack<BITS, T>(block + HEAD<BITS>, [&](int half, int64_t k, floats values) {
                T* place = unpacked + k * PANEL + half * LANES * STEP<T>;
                if constexpr (STEP<T> == 1)
                    store(place, values);
                else
                    std::memcpy(place, &values, sizeof values);
            });
            for_tiles(first, end, [&](auto count, int64_t m) {
                tile<count, BITS>(x + m * inputs + g * GROUP, inputs, unpacked, scaling, sums.data() + m * groups + g, groups,
                                  totals + (m - first) * PANEL);
            });
        }
        for (int64_t m = first; m < end; m++) {
            const float* total = totals + (m - first) * PANEL;
            store_row(out + m * outputs + n * PANEL, load(total), load(total + LANES), width);
        }
    });
}

template <int BITS>
uint8_t* word_at(uint8_t* block, int64_t lane, int64_t k) {
    const int64_t half = lane / LANES, vector = k / WORD<BITS> * 2 + half;
    return block + HEAD<BITS> + vector * sizeof(words) + lane % LANES * 4;
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
                uint8_t* block = packed + (n * groups + g) * BLOCK<BITS>;
                const int64_t lane = row % PANEL;
                std::memcpy(block + 2 * lane, scales + row * groups + g, 2);
                if (BITS == 4) std::memcpy(block + 2 * (PANEL + lane), minima + row * groups + g, 2);
                for (int64_t k = 0; k < GROUP; k++) {
                    uint8_t* at = word_at<BITS>(block, lane, k);
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
            const int64_t lane = ids[i] % PANEL, in_vector = lane / LANES * LANES;
            const uint8_t* block = packed + (ids[i] / PANEL * groups + k / GROUP) * BLOCK<BITS>;
            uint32_t word;
            std::memcpy(&word, word_at<BITS>((uint8_t*)block, lane, k % GROUP), 4);
            const floats value = value_of<BITS>(words{} + word, k % GROUP);
            const floats scale = load_halves(block + 2 * in_vector);
            float minimum = 0.0f;
            if (BITS == 4) minimum = load_halves(block + 2 * (PANEL + in_vector))[lane % LANES];
            out[i * width + k] = value[0] * scale[lane % LANES] + minimum;
        }
}

}  // namespace

// values [outputs, inputs] of a byte each; scales and minima (4 bits only) fp16 [outputs, groups].
extern "C" void kvloom_groups_pack(int bits, const uint8_t* values, const uint16_t* scales, const uint16_t* minima,
                                   int64_t outputs, int64_t inputs, uint8_t* packed) {
    if (bits == 4)
        pack<4>(values, scales, minima, outputs, inputs, packed);
    else
        pack<8>(values, scales, minima, outputs, inputs, packed);
}

// x [rows, inputs] to out [rows, outputs].
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

// Rows `ids` of the weight, to out fp32 [count, width]; inputs is the width up to a multiple of a group.
extern "C" void kvloom_groups_rows(int bits, const uint8_t* packed, const int64_t* ids, int64_t count, int64_t inputs,
                                   int64_t width, float* out) {
    if (bits == 4)
        rows_of<4>(packed, ids, count, inputs, width, out);
    else
        rows_of<8>(packed, ids, count, inputs, width, out);
}
REPLAYED(kvloom_groups_rows)
