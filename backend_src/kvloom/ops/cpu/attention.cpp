// Attention over the paged cache, which reads blocks in place.
//
// It is an online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022) over tiles of keys. Keys are
// split into parts at multiples of PART, tiles begin at multiples of TILE, and parts are joined in order, whichever
// thread computed them (as in Flash-Decoding, Dao et al., 2023). So a query's result depends only on its own sequence,
// and not on its chunk, other sequences or the number of threads. There is one exception: with pairs of bf16 numbers, a
// sequence's single query (a decode) is computed differently, in other tiles, and rounds differently.
#include <omp.h>

#include <atomic>
#include <memory>
#include <vector>

#include "attention_decode.h"
#include "attention_plan.h"
#include "attention_tile.h"
#include "replay.h"

namespace {

// Memory that a thread keeps until its next call.
class Scratch {
    std::vector<uint32_t> memory_;
    size_t used_ = 0;

public:
    void reset(size_t size) {
        if (memory_.size() < size + 16) memory_.resize(size + 16);
        used_ = (64 - (uintptr_t)memory_.data() % 64) / 4 % 16;
    }
    template <typename T>
    T* take(size_t count) {
        T* p = (T*)(memory_.data() + used_);
        used_ += (count + 15) / 16 * 16;
        return p;
    }
};

template <int D>
State take_state(Scratch& scratch, int rows) {
    return {scratch.take<float>(rows * D), scratch.take<float>(rows), scratch.take<float>(rows)};
}

// Queries and results, [tokens, heads, head_dim], both fp32 or both bf16.
struct Rows {
    const void* queries;
    void* out;
    bool are_bf16;
};

template <typename M, int D, typename T>
class Attention {
    const Rows q_;
    const T *k_, *v_;
    const int32_t* tables_;
    const Shape& shape_;
    const int group_;

public:
    Attention(const Rows& q, const T* k, const T* v, const int32_t* tables, const Shape& shape)
        : q_(q), k_(k), v_(v), tables_(tables), shape_(shape), group_(shape.heads / shape.kv_heads) {}

    int rows(const Task& task) const { return task.tokens * width(task); }

    // A whole task by one thread.
    void whole(const Task& task, const Places& after, Scratch& scratch) const {
        const Buffers buffers = begin(task, scratch);
        const State state = take_state<D>(scratch, rows(task)), part = take_state<D>(scratch, rows(task));
        if (task.parts() == 1) {
            attend_part(task, 0, after, buffers, state);
            finish(task, state);
            return;
        }
        state.clear<D>(rows(task));
        for (int64_t i = 0; i < task.parts(); i++) {
            attend_part(task, i, i + 1 < task.parts() ? find(task, (i + 1) * PART) : after, buffers, part);
            merge<D>(rows(task), part, state);
        }
        finish(task, state);
    }

    // One part of a task.
    void part(const Task& task, int64_t index, const Places& after, Scratch& scratch, float* partials) const {
        const Buffers buffers = begin(task, scratch);
        attend_part(task, index, after, buffers, partial(task, index, partials));
    }

    // Joins the parts of a task when all are computed.
    void join(const Task& task, Scratch& scratch, float* partials) const {
        scratch.reset(state_size(rows(task), D) + 48);
        const State state = take_state<D>(scratch, rows(task));
        state.clear<D>(rows(task));
        for (int64_t i = 0; i < task.parts(); i++) merge<D>(rows(task), partial(task, i, partials), state);
        finish(task, state);
    }

    // The places of the tile that begins with key `first`.
    Places find(const Task& task, int64_t first) const {
        const int32_t* table = tables_ + task.sequence * shape_.table_stride;
        const int64_t bs = shape_.block_size;
        const int n = task.tile(first);
        Places places;
        places.n = n;
        places.heads = task.kv_heads;
        for (int j = 0; j < n;) {
            const int64_t offset = (first + j) % bs;
            const int64_t place = table[(first + j) / bs] * shape_.block_stride + (task.kv_head * bs + offset) * D;
            const int run = std::min<int64_t>(n - j, bs - offset);
            for (int i = 0; i < run; i++) places.at[j++] = place + i * D;
        }
        for (int j = n; j % LANES; j++) places.at[j] = places.at[n - 1];
        return places;
    }

private:
    // The number of a task's rows per token.
    int width(const Task& task) const { return task.kv_heads * group_; }

    Buffers begin(const Task& task, Scratch& scratch) const {
        constexpr int W = WORDS<M, D>;
        if (task.decode) {
            scratch.reset(rows(task) * TILE / 2 + 2 * state_size(rows(task), D) + 256);
            return {scratch.take<uint32_t>(rows(task) * TILE / 2), nullptr, nullptr, nullptr, nullptr};
        }
        scratch.reset(rows(task) * (W + 1) + TILE * W * 2 + 2 * state_size(rows(task), D) + 256);
        const Buffers buffers{nullptr, scratch.take<uint32_t>(rows(task) * W), scratch.take<uint32_t>(TILE * W),
                              scratch.take<uint32_t>(TILE * W), scratch.take<int>(rows(task))};
        auto* queries = (typename M::number*)buffers.queries;
        for (int t = 0; t < task.tokens; t++, queries += width(task) * D) {
            if (q_.are_bf16)
                copy((const bf16*)q_.queries + row(task, t), 1.0f, width(task), queries);
            else
                copy((const float*)q_.queries + row(task, t), 1.0f, width(task), queries);
        }
        return buffers;
    }

    // The first row of a task's token.
    int64_t row(const Task& task, int t) const {
        return ((task.token + t) * shape_.heads + task.kv_head * group_) * D;
    }

    template <typename I, typename O>
    static void copy(const I* in, float factor, int rows, O* out) {
        for (int i = 0; i < rows * D; i += LANES) store(out + i, load(in + i) * factor);
    }

    State partial(const Task& task, int64_t index, float* partials) const {
        float* sums = partials + task.partial + index * state_size(rows(task), D);
        return {sums, sums + rows(task) * D, sums + rows(task) * (D + 1)};
    }

    // `after` is the work of this thread after this one, to prefetch its data.
    void attend_part(const Task& task, int64_t index, const Places& after, const Buffers& buffers,
                     const State& state) const {
        state.clear<D>(rows(task));
        const int64_t end = std::min(task.position + task.tokens, (index + 1) * PART);
        Places next = find(task, index * PART);
        for (int64_t first = index * PART, n; first < end; first += n) {
            const Places places = next;
            n = places.n;
            next = first + n < end ? find(task, first + n) : after;
#if defined(__AVX512BF16__)
            if constexpr (M::SIZE == 2) {
                if (task.decode) {
                    const int64_t stride = shape_.block_size * D;
                    attend_decode<D>(group_, (const bf16*)q_.queries + row(task, 0), {k_, &places, stride}, v_,
                                     {k_, &next, stride}, shape_.scale, state, (bf16*)buffers.weights);
                    continue;
                }
            }
#endif
            pack_keys<M, D>(k_, places, next, buffers.keys);
            pack_values<M, D>(v_, places, next, buffers.values);
            // a token attends to itself and earlier tokens; tokens before `first` attend to nothing of this tile
            const int blind = std::max<int64_t>(0, first - task.position) * group_;
            for (int r = blind; r < rows(task); r++)
                buffers.seen[r] = std::min<int64_t>(places.n, task.position + r / group_ + 1 - first);
            attend_tile<M, D>(blind, rows(task), buffers.queries, buffers.keys, buffers.values, buffers.seen,
                              shape_.scale, state);
        }
    }

    void finish(const Task& task, const State& state) const {
        for (int r = 0; r < rows(task); r++) {
            const int64_t place = row(task, r / width(task)) + r % width(task) * D;
            // a sequence of length 0 is padding
            const float scale = state.totals[r] > 0 ? 1.0f / state.totals[r] : 0.0f;
            if (q_.are_bf16)
                copy(state.sums + r * D, scale, 1, (bf16*)q_.out + place);
            else
                copy(state.sums + r * D, scale, 1, (float*)q_.out + place);
        }
    }
};

template <typename M, int D, typename T>
void run(const Rows& q, const T* k, const T* v, const int32_t* tables, const int32_t* starts, const int32_t* lengths,
         int64_t sequences, const Shape& shape) {
    static thread_local Plan own_plan;  // keeps its memory until the next call
    const Plan& plan = own_plan;        // shared by all threads
    const int64_t memory = own_plan.make(starts, lengths, sequences, shape, D, M::SIZE == 2);
    const std::unique_ptr<float[]> partials(memory ? new float[memory] : nullptr);
    const Attention<M, D, T> attention(q, k, v, tables, shape);
    std::atomic<size_t> claimed{0};
    static thread_local Scratch scratch;
#pragma omp parallel
    {
        const size_t count = plan.pieces.size();
        for (size_t i = omp_get_thread_num(), n; i < count; i = n) {
            // taken early, so that its first keys can be prefetched in time
            n = claimed.fetch_add(1, std::memory_order_relaxed) + omp_get_num_threads();
            Places after;
            after.n = after.heads = 0;
            if (n < count) after = attention.find(*plan.pieces[n].task, plan.pieces[n].first());
            const auto [task, part] = plan.pieces[i];
            if (part < 0)
                attention.whole(*task, after, scratch);
            else
                attention.part(*task, part, after, scratch, partials.get());
        }
        if (!plan.divided.empty()) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < plan.divided.size(); i++) attention.join(*plan.divided[i], scratch, partials.get());
        }
    }
}

template <typename M, typename T>
int dispatch(const Rows& q, const void* k, const void* v, const int32_t* tables, const int32_t* starts,
             const int32_t* lengths, int64_t sequences, int64_t head_dim, const Shape& shape) {
#define CASE(D) \
    case D: run<M, D>(q, (const T*)k, (const T*)v, tables, starts, lengths, sequences, shape); return 0;
    switch (head_dim) {
        CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(112) CASE(128) CASE(192) CASE(256)
    }
#undef CASE
    return 1;
}

}  // namespace

// Returns 0, or 1 if there is no kernel for this head_dim.
extern "C" int kvloom_paged_attention(const void* q, int q_bf16, const void* k, const void* v, int cache_bf16,
                                      const int32_t* tables, int64_t table_stride, const int32_t* starts,
                                      const int32_t* lengths, int64_t sequences, int64_t heads, int64_t kv_heads,
                                      int64_t head_dim, int64_t block_size, int64_t block_stride, float scale,
                                      void* out) {
    const Shape shape{heads, kv_heads, block_size, block_stride, table_stride, scale * float(M_LOG2E)};
    const Rows rows{q, out, q_bf16 != 0};
#define CALL(M, T) dispatch<M, T>(rows, k, v, tables, starts, lengths, sequences, head_dim, shape)
#if defined(__AVX512BF16__)
    if (q_bf16 && cache_bf16) return CALL(Pair, bf16);
#endif
    return cache_bf16 ? CALL(Single, bf16) : CALL(Single, float);
#undef CALL
}
REPLAYED(kvloom_paged_attention)
