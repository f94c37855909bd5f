// Attention over the paged cache, reading blocks where they lie.
//
// Online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022) over tiles of keys that begin at
// multiples of TILE. What is computed for a query depends on its own sequence alone: not on the chunk it came in, nor
// on its neighbours, so that answers are the same however they were batched.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "common.h"

namespace {

constexpr int TILE = 32;  // keys per tile; a block smaller than that is a tile
constexpr int ROWS = 32;  // queries of a prefill chunk that read a tile together

struct Shape {
    int64_t heads, kv_heads, block_size, block_stride, table_stride;
    float scale;
};

// A tile's keys as [D][TILE], in fp32: so that a query's scores of neighbouring keys are neighbours.
template <int D, typename T>
void transpose_keys(const T* keys, int n, float* turned) {
    for (int first = 0; first < TILE; first += LANES)
        for (int column = 0; column < D; column += LANES) {
            floats rows[LANES];
            for (int j = 0; j < LANES; j++)
                rows[j] = first + j < n ? load(keys + (first + j) * D + column) : floats{};
            transpose(rows);
            for (int i = 0; i < LANES; i++) store(turned + (column + i) * TILE + first, rows[i]);
        }
}

// Scores of R rows of queries (fp32, scaled, D apart) against a tile of keys.
template <int R, int D>
void score(const float* q, const float* keys, float* scores) {
    constexpr int V = TILE / LANES;
    floats sums[R][V] = {};
    for (int i = 0; i < D; i++)
        for (int v = 0; v < V; v++) {
            const floats k = load(keys + i * TILE + v * LANES);
            for (int r = 0; r < R; r++) sums[r][v] += q[r * D + i] * k;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(scores + r * TILE + v * LANES, sums[r][v]);
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
                const floats v = load(values + j * D + (first + i) * LANES);
                for (int r = 0; r < R; r++) sums[r][i] += weights[r * TILE + j] * v;
            }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < width; i++) store(out + r * D + (first + i) * LANES, sums[r][i]);
    }
}

// Calls BODY with R = 8, 4, 2 and 1 until all rows are done; r is the first row of each.
#define FOR_ROWS(ROWS, MOST, BODY)                              \
    {                                                           \
        int r = 0;                                              \
        auto body = [&](auto count) {                           \
            constexpr int R = decltype(count)::value;           \
            for (; r + R <= (ROWS); r += R) BODY;               \
        };                                                      \
        if constexpr ((MOST) >= 8) body(Count<8>{});            \
        if constexpr ((MOST) >= 4) body(Count<4>{});            \
        body(Count<2>{});                                       \
        body(Count<1>{});                                       \
    }
template <int N>
using Count = std::integral_constant<int, N>;

template <int D>
void score_rows(int rows, const float* q, const float* keys, float* scores) {
    FOR_ROWS(rows, LANES == 16 ? 8 : 2, (score<R, D>(q + r * D, keys, scores + r * TILE)))
}

template <int D, typename T>
void mix_rows(int rows, const float* weights, const T* values, int n, float* out) {
    FOR_ROWS(rows, 4, (mix<R, D>(weights + r * TILE, values, n, out + r * D)))
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
    scratch.resize(rows * (2 * D + TILE + 2) + 2 * TILE * D);
    float* keys = scratch.data();
    float* values = keys + TILE * D;
    float* queries = values + TILE * D;
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
        transpose_keys<D>(k_cache + place, n, keys);
        score_rows<D>(rows - blind, queries + blind * D, keys, scores + blind * TILE);
        for (int r = blind; r < rows; r++) {
            const int seen = std::min<int64_t>(n, position + r / group + 1 - first);
            softmax_row<D>(scores + r * TILE, seen, largest + r, totals + r, sums + r * D);
        }
        if constexpr (std::is_same_v<T, float>) {
            mix_rows<D>(rows - blind, scores + blind * TILE, v_cache + place, n, sums + blind * D);
        } else {
            for (int i = 0; i < n * D; i += LANES) store(values + i, load(v_cache + place + i));
            mix_rows<D>(rows - blind, scores + blind * TILE, values, n, sums + blind * D);
        }
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
    const int64_t most = std::max<int64_t>(1, ROWS / (shape.heads / shape.kv_heads));
    for (int64_t b = 0; b < sequences; b++)
        // from the end: the tasks that take longest first
        for (int64_t end = query_starts[b + 1]; end > query_starts[b]; end -= most) {
            const int64_t start = std::max<int64_t>(query_starts[b], end - most);
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

// Returns 0, or 1 where there is no kernel for this head_dim, or a tile would run over the end of a block.
extern "C" int kvloom_paged_attention(const void* q, int q_bf16, const void* k, const void* v, int cache_bf16,
                                      const int32_t* tables, int64_t table_stride, const int32_t* starts,
                                      const int32_t* lens, int64_t sequences, int64_t heads, int64_t kv_heads,
                                      int64_t head_dim, int64_t block_size, int64_t block_stride, float scale,
                                      void* out) {
    if (block_size > TILE && block_size % TILE) return 1;
    const Shape shape{heads, kv_heads, block_size, block_stride, table_stride, scale};
    if (q_bf16 && cache_bf16)
        return dispatch<bf16, bf16>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
    if (q_bf16) return dispatch<bf16, float>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
    if (cache_bf16) return dispatch<float, bf16>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
    return dispatch<float, float>(q, k, v, tables, starts, lens, sequences, head_dim, shape, out);
}
