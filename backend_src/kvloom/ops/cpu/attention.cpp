// Attention over the paged cache, reading blocks where they lie.
//
// Online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022) over tiles of keys that begin at
// multiples of TILE. What is computed for a query depends on its own sequence alone: not on the chunk it came in, nor
// on its neighbours, so that answers are the same however they were batched.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"

namespace {

constexpr int TILE = 32;         // keys per tile; a block smaller than that is a tile
constexpr int QUERY_TOKENS = 8;  // tokens of a prefill chunk that read a tile together

struct Shape {
    int64_t heads, kv_heads, block_size, block_stride, table_stride;
    float scale;
};

// Scores of R rows of queries (fp32, scaled, D apart) against n keys.
template <int R, int D, typename T>
void score(const float* q, const T* keys, int n, float* scores) {
    constexpr int V = D / LANES;
    for (int j = 0; j < n; j++) {
        floats sums[R] = {};
        for (int i = 0; i < V; i++) {
            floats k = load(keys + j * D + i * LANES);
            for (int r = 0; r < R; r++) sums[r] += load(q + r * D + i * LANES) * k;
        }
        for (int r = 0; r < R; r++) scores[r * TILE + j] = sum_of(sums[r]);
    }
}

// R rows of output += weights times n values.
template <int R, int D, typename T>
void mix(const float* weights, const T* values, int n, float* out) {
    // as many columns at once as registers hold beside the weights
    constexpr int COLUMNS = std::min(D / LANES, (LANES == 16 ? 24 : 8) / R);
    constexpr int V = D / LANES;
    for (int first = 0; first < V; first += COLUMNS) {
        const int width = std::min(COLUMNS, V - first);
        floats sums[R][COLUMNS];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < width; i++) sums[r][i] = load(out + r * D + (first + i) * LANES);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < width; i++) {
                floats v = load(values + j * D + (first + i) * LANES);
                for (int r = 0; r < R; r++) sums[r][i] += weights[r * TILE + j] * v;
            }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < width; i++) store(out + r * D + (first + i) * LANES, sums[r][i]);
    }
}

template <int D, typename T>
void score_rows(int rows, const float* q, const T* keys, int n, float* scores) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) score<4, D>(q + r * D, keys, n, scores + r * TILE);
    if (rows - r == 3) score<3, D>(q + r * D, keys, n, scores + r * TILE);
    if (rows - r == 2) score<2, D>(q + r * D, keys, n, scores + r * TILE);
    if (rows - r == 1) score<1, D>(q + r * D, keys, n, scores + r * TILE);
}

template <int D, typename T>
void mix_rows(int rows, const float* weights, const T* values, int n, float* out) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) mix<4, D>(weights + r * TILE, values, n, out + r * D);
    if (rows - r == 3) mix<3, D>(weights + r * TILE, values, n, out + r * D);
    if (rows - r == 2) mix<2, D>(weights + r * TILE, values, n, out + r * D);
    if (rows - r == 1) mix<1, D>(weights + r * TILE, values, n, out + r * D);
}

// A row's scores of n keys to weights: e^(score - largest so far); what was added up before is scaled to match.
template <int D>
void softmax_row(float* scores, int n, float* largest, float* total, float* out) {
    for (int j = n; j < TILE; j++) scores[j] = -INFINITY;
    floats peak = load(scores);
    for (int j = LANES; j < TILE; j += LANES) {
        floats s = load(scores + j);
        peak = s > peak ? s : peak;
    }
    const float now = max_of(peak);
    if (now > *largest) {
        const float shrink = std::exp(*largest - now);  // 0 at the first tile
        *total *= shrink;
        for (int i = 0; i < D; i += LANES) store(out + i, load(out + i) * shrink);
        *largest = now;
    }
    floats sums = {};
    for (int j = 0; j < TILE; j += LANES) {
        floats s = load(scores + j);
        floats weight = exp_of(s - *largest);
        weight = s == -INFINITY ? floats{} : weight;
        sums += weight;
        store(scores + j, weight);
    }
    *total += sum_of(sums);
}

// The `group` query heads of one KV head, for `tokens` tokens from `position` on; q and out point to the first token.
template <int D, typename Q, typename T>
void attend(const Q* q, const T* k_cache, const T* v_cache, const int32_t* table, int64_t position, int tokens,
            int64_t kv_head, const Shape& shape, Q* out, std::vector<float>& scratch) {
    const int group = shape.heads / shape.kv_heads;
    const int rows = tokens * group;
    const int64_t bs = shape.block_size;
    const int tile = std::min<int64_t>(TILE, bs);
    scratch.resize(rows * (2 * D + TILE + 2));
    float* queries = scratch.data();
    float* sums = queries + rows * D;
    float* scores = sums + rows * D;
    float* largest = scores + rows * TILE;
    float* totals = largest + rows;
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < group; g++) {
            const Q* row = q + (t * shape.heads + kv_head * group + g) * D;
            for (int i = 0; i < D; i++) queries[(t * group + g) * D + i] = widen(row[i]) * shape.scale;
        }
    std::fill(sums, sums + rows * D, 0.0f);
    std::fill(largest, largest + rows, -INFINITY);
    std::fill(totals, totals + rows, 0.0f);
    const int64_t length = position + tokens;
    for (int64_t first = 0; first < length; first += tile) {
        const int n = std::min<int64_t>(tile, length - first);
        const int64_t place = table[first / bs] * shape.block_stride + (kv_head * bs + first % bs) * D;
        // a token sees itself and what comes before it; those before `first` see nothing of this tile
        const int blind = std::max<int64_t>(0, first - position) * group;
        score_rows<D>(rows - blind, queries + blind * D, k_cache + place, n, scores + blind * TILE);
        for (int r = blind; r < rows; r++) {
            const int seen = std::min<int64_t>(n, position + r / group + 1 - first);
            softmax_row<D>(scores + r * TILE, seen, largest + r, totals + r, sums + r * D);
        }
        mix_rows<D>(rows - blind, scores + blind * TILE, v_cache + place, n, sums + blind * D);
    }
    for (int t = 0; t < tokens; t++)
        for (int g = 0; g < group; g++) {
            const int r = t * group + g;
            Q* row = out + (t * shape.heads + kv_head * group + g) * D;
            const float scale = 1.0f / totals[r];
            for (int i = 0; i < D; i++) narrow(row + i, sums[r * D + i] * scale);
        }
}

struct Task {
    int64_t sequence, token;
    int tokens, kv_head;
};

template <int D, typename Q, typename T>
void run(const Q* q, const T* k_cache, const T* v_cache, const int32_t* tables, const int32_t* query_starts,
         const int32_t* seq_lens, int64_t sequences, const Shape& shape, Q* out) {
    std::vector<Task> tasks;
    for (int64_t b = 0; b < sequences; b++)
        // from the end: the tasks that take longest first
        for (int64_t end = query_starts[b + 1]; end > query_starts[b]; end -= QUERY_TOKENS) {
            const int64_t start = std::max<int64_t>(query_starts[b], end - QUERY_TOKENS);
            for (int h = 0; h < shape.kv_heads; h++) tasks.push_back({b, start, int(end - start), h});
        }
#pragma omp parallel
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < tasks.size(); i++) {
            const Task& task = tasks[i];
            const int64_t b = task.sequence, row = task.token * shape.heads * D;
            const int64_t position = seq_lens[b] - (query_starts[b + 1] - task.token);
            attend<D>(q + row, k_cache, v_cache, tables + b * shape.table_stride, position, task.tokens, task.kv_head,
                      shape, out + row, scratch);
        }
    }
}

template <typename Q, typename T>
int dispatch(const void* q, const void* k, const void* v, const int32_t* tables, const int32_t* starts,
             const int32_t* lens, int64_t sequences, int64_t head_dim, const Shape& shape, void* out) {
#define CASE(D) \
    case D: run<D>((const Q*)q, (const T*)k, (const T*)v, tables, starts, lens, sequences, shape, (Q*)out); return 0;
    switch (head_dim) {
        CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(112) CASE(128) CASE(192) CASE(256)
    }
#undef CASE
    return 1;
}

}  // namespace

// Returns 0, or 1 where there is no kernel for this head_dim.
extern "C" int kvloom_paged_attention(const void* q, int q_bf16, const void* k, const void* v, int cache_bf16,
                                      const int32_t* tables, int64_t table_stride, const int32_t* starts,
                                      const int32_t* lens, int64_t sequences, int64_t heads, int64_t kv_heads,
                                      int64_t head_dim, int64_t block_size, int64_t block_stride, float scale,
                                      void* out) {
    const Shape shape{heads, kv_heads, block_size, block_stride, table_stride, scale};
    if (q_bf16 && cache_bf16)
        return dispatch<bf16, bf16>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
    if (q_bf16) return dispatch<bf16, float>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
    if (cache_bf16) return dispatch<float, bf16>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
    return dispatch<float, float>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
}
