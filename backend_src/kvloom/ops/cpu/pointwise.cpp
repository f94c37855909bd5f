// Rows of a table, residual add and RMS norm, RoPE with the cache write, gated activation: one pass over each row.
#include <cmath>

#include "activation.h"
#include "common.h"
#include "replay.h"

namespace {

// Less work is not worth another thread: rows to copy, elements with an exponential.
constexpr int64_t PARALLEL_ROWS = 8, PARALLEL_GATES = 4096;

template <typename U, typename O>
void add_rms_norm(const float* residual, const U* update, const O* weight, float eps, const int64_t* rows,
                  int64_t count, int64_t width, float* sum, O* normed) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_ROWS)
    for (int64_t r = 0; r < count; r++) {
        const int64_t row = rows ? rows[r] : r;
        const float* in = residual + row * width;
        const U* more = update ? update + row * width : nullptr;
        float* added = sum + r * width;
        // several sums, so that no addition waits for the one before
        constexpr int SUMS = 4;
        floats squares[SUMS] = {};
        const auto add = [&](int64_t i, floats& sum_of_squares) {
            floats x = load(in + i);
            if (more) x += load(more + i);
            store(added + i, x);
            sum_of_squares += x * x;
        };
        int64_t i = 0;
        for (; i + SUMS * LANES <= width; i += SUMS * LANES)
            for (int s = 0; s < SUMS; s++) add(i + s * LANES, squares[s]);
        for (; i + LANES <= width; i += LANES) add(i, squares[0]);
        float total = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
        for (; i < width; i++) {
            added[i] = in[i] + (more ? widen(more[i]) : 0.0f);
            total += added[i] * added[i];
        }
        const float scale = 1.0f / std::sqrt(total / width + eps);
        O* out = normed + r * width;
        for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(added + i) * scale * load(weight + i));
        for (; i < width; i++) narrow(out + i, added[i] * scale * widen(weight[i]));
    }
}

// Rotates a head by the angles of a position.
template <typename Q, typename T>
static inline void rotate(const Q* in, const float* cosines, const float* sines, int64_t half, T* out) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const floats a = load(in + i), b = load(in + half + i), c = load(cosines + i), s = load(sines + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = widen(in[i]), b = widen(in[half + i]);
        narrow(out + i, a * cosines[i] - b * sines[i]);
        narrow(out + half + i, b * cosines[i] + a * sines[i]);
    }
}

template <typename Q, typename T>
static inline void copy(const Q* in, int64_t count, T* out) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(in + i));
    for (; i < count; i++) narrow(out + i, widen(in[i]));
}

template <typename Q, typename T>
void rope_kv_write(const Q* qkv, const float* cos_sin, const int64_t* positions, const int64_t* slots, T* k_cache,
                   T* v_cache, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                   int64_t block_stride, Q* q_out) {
    const int64_t half = dim / 2, line = 64 / sizeof(T);
#pragma omp parallel for schedule(static) if (rows >= PARALLEL_ROWS)
    for (int64_t t = 0; t < rows; t++) {
        const Q* row = qkv + t * (heads + 2 * kv_heads) * dim;
        const float* cosines = cos_sin + positions[t] * dim;
        const float* sines = cosines + half;
        const bool kept = slots[t] >= 0;
        const int64_t place = kept ? slots[t] / block_size * block_stride + slots[t] % block_size * dim : 0;
        // The lines of the KV cache are far apart in memory, so prefetch all of them before writing the first one
        if (kept)
            for (int64_t h = 0; h < kv_heads; h++)
                for (int64_t i = 0; i < dim; i += line) {
                    __builtin_prefetch(k_cache + place + h * block_size * dim + i, 1);
                    __builtin_prefetch(v_cache + place + h * block_size * dim + i, 1);
                }
        for (int64_t h = 0; h < heads; h++)
            rotate(row + h * dim, cosines, sines, half, q_out + (t * heads + h) * dim);
        if (!kept) continue;
        for (int64_t h = 0; h < kv_heads; h++) {
            const int64_t there = place + h * block_size * dim;
            rotate(row + (heads + h) * dim, cosines, sines, half, k_cache + there);
            copy(row + (heads + kv_heads + h) * dim, dim, v_cache + there);
        }
    }
}

template <typename T>
void silu_mul(const T* gate_up, int64_t rows, int64_t width, T* out) {
#pragma omp parallel for schedule(static) if (rows * width >= PARALLEL_GATES)
    for (int64_t r = 0; r < rows; r++) {
        const T* gate = gate_up + r * 2 * width;
        const T* up = gate + width;
        T* o = out + r * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(o + i, silu_mul_of<T>(load(gate + i), load(up + i)));
        for (; i < width; i++) {
            const float g = widen(gate[i]);
            narrow(o + i, g / (std::exp(-g) + 1.0f) * widen(up[i]));
        }
    }
}

template <typename T>
void rows_of(const T* table, const int64_t* ids, int64_t count, int64_t width, float* out) {
#pragma omp parallel for schedule(static) if (count >= PARALLEL_ROWS)
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < width; k++) out[i * width + k] = widen(table[ids[i] * width + k]);
}

}  // namespace

// Copies rows `ids` of a table [n, width] to out, fp32 [count, width].
extern "C" void kvloom_rows(const void* table, int is_bf16, const int64_t* ids, int64_t count, int64_t width,
                            float* out) {
    if (is_bf16)
        rows_of((const bf16*)table, ids, count, width, out);
    else
        rows_of((const float*)table, ids, count, width, out);
}
REPLAYED(kvloom_rows)

// Computes the `count` rows listed in `rows`, or the first `count` rows if it is null.
extern "C" void kvloom_add_rms_norm(const float* residual, const void* update, int update_bf16, const void* weight,
                                    int weight_bf16, float eps, const int64_t* rows, int64_t count, int64_t width,
                                    float* sum, void* normed) {
#define CALL(U, O) \
    add_rms_norm<U, O>(residual, (const U*)update, (const O*)weight, eps, rows, count, width, sum, (O*)normed)
    if (update_bf16)
        weight_bf16 ? CALL(bf16, bf16) : CALL(bf16, float);
    else
        weight_bf16 ? CALL(float, bf16) : CALL(float, float);
#undef CALL
}
REPLAYED(kvloom_add_rms_norm)

extern "C" void kvloom_rope_kv_write(const void* qkv, int qkv_bf16, const float* cos_sin, const int64_t* positions,
                                     const int64_t* slots, void* k, void* v, int cache_bf16, int64_t rows,
                                     int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size,
                                     int64_t block_stride, void* q_out) {
#define CALL(Q, T)                                                                                             \
    rope_kv_write<Q, T>((const Q*)qkv, cos_sin, positions, slots, (T*)k, (T*)v, rows, heads, kv_heads, dim,    \
                        block_size, block_stride, (Q*)q_out)
    if (qkv_bf16)
        cache_bf16 ? CALL(bf16, bf16) : CALL(bf16, float);
    else
        cache_bf16 ? CALL(float, bf16) : CALL(float, float);
#undef CALL
}
REPLAYED(kvloom_rope_kv_write)

extern "C" void kvloom_silu_mul(const void* gate_up, int is_bf16, int64_t rows, int64_t width, void* out) {
    if (is_bf16)
        silu_mul<bf16>((const bf16*)gate_up, rows, width, (bf16*)out);
    else
        silu_mul<float>((const float*)gate_up, rows, width, (float*)out);
}
REPLAYED(kvloom_silu_mul)
