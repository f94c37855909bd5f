// Attention over the paged cache, reading blocks where they lie.
//
// Online softmax (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022) over tiles of keys. Keys are divided
// into parts at multiples of PART, tiles begin at multiples of TILE, and parts are joined in their order, whoever
// computed them (as in Flash-Decoding, Dao et al., 2023). So what is computed for a query depends on its own sequence
// alone: not on the chunk it came in, nor on its neighbours or the number of threads.
#include <omp.h>

#include <memory>
#include <vector>

#include "attention_tile.h"
#include "replay.h"

namespace {

constexpr int PART = 256;  // keys that one thread computes at least
constexpr int ROWS = 96;   // rows of queries that a packed tile is used for
constexpr int TASKS = 4;   // per thread: so many that none waits long for the last one
static_assert(PART % TILE == 0);

struct Shape {
    int64_t heads, kv_heads, block_size, block_stride, table_stride;
    float scale;
};

// Some neighbouring queries of a sequence and the query heads of one KV head.
struct Task {
    int64_t sequence, token, position;
    int tokens, kv_head;
    int64_t partial;  // where the states of its parts are kept, if it is divided among threads; else -1

    int64_t parts() const { return (position + tokens + PART - 1) / PART; }
};

// Memory of a thread that stays until the next call.
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

template <int D>
constexpr int64_t state_size(int64_t rows) {
    return rows * (D + 2);
}

// Queries and what becomes of them, [tokens, heads, head_dim]; both fp32 or both bf16.
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

    int rows(const Task& task) const { return task.tokens * group_; }

    // All of a task by one thread.
    void whole(const Task& task, const Places& after, Scratch& scratch) const {
        const Buffers buffers = begin(task, scratch);
        const State state = take_state<D>(scratch, rows(task)), part = take_state<D>(scratch, rows(task));
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

    // The end of a task whose parts are all there.
    void join(const Task& task, Scratch& scratch, float* partials) const {
        scratch.reset(state_size<D>(rows(task)) + 48);
        const State state = take_state<D>(scratch, rows(task));
        state.clear<D>(rows(task));
        for (int64_t i = 0; i < task.parts(); i++) merge<D>(rows(task), partial(task, i, partials), state);
        finish(task, state);
    }

    // Where the tile that begins with key `first` lies.
    Places find(const Task& task, int64_t first) const {
        const int32_t* table = tables_ + task.sequence * shape_.table_stride;
        const int64_t bs = shape_.block_size;
        const int n = std::min<int64_t>(TILE, task.position + task.tokens - first);
        Places places;
        places.n = n;
        for (int j = 0; j < n;) {
            const int64_t offset = (first + j) % bs;
            const int64_t place = table[(first + j) / bs] * shape_.block_stride + (task.kv_head * bs + offset) * D;
            const int run = std::min<int64_t>(n - j, bs - offset);
            for (int i = 0; i < run; i++) places.at[j++] = place + i * D;
        }
        return places;
    }

private:
    Buffers begin(const Task& task, Scratch& scratch) const {
        constexpr int W = WORDS<M, D>;
        scratch.reset(rows(task) * (W + 1) + TILE * W * 2 + 2 * state_size<D>(rows(task)) + 256);
        const Buffers buffers{scratch.take<uint32_t>(rows(task) * W), scratch.take<uint32_t>(TILE * W),
                              scratch.take<uint32_t>(TILE * W), scratch.take<int>(rows(task))};
        auto* queries = (typename M::number*)buffers.queries;
        for (int t = 0; t < task.tokens; t++, queries += group_ * D) {
            if (q_.are_bf16)
                copy((const bf16*)q_.queries + row(task, t), 1.0f, group_, queries);
            else
                copy((const float*)q_.queries + row(task, t), 1.0f, group_, queries);
        }
        return buffers;
    }

    // Where the rows of a task's token begin.
    int64_t row(const Task& task, int t) const {
        return ((task.token + t) * shape_.heads + task.kv_head * group_) * D;
    }

    template <typename I, typename O>
    static void copy(const I* in, float factor, int rows, O* out) {
        for (int i = 0; i < rows * D; i += LANES) store(out + i, load(in + i) * factor);
    }

    State partial(const Task& task, int64_t index, float* partials) const {
        float* sums = partials + task.partial + index * state_size<D>(rows(task));
        return {sums, sums + rows(task) * D, sums + rows(task) * (D + 1)};
    }

    // `after` is what this thread will need when it is done.
    void attend_part(const Task& task, int64_t index, const Places& after, const Buffers& buffers,
                     const State& state) const {
        state.clear<D>(rows(task));
        const int64_t end = std::min(task.position + task.tokens, (index + 1) * PART);
        Places next = find(task, index * PART);
        for (int64_t first = index * PART; first < end; first += TILE) {
            const Places places = next;
            next = first + TILE < end ? find(task, first + TILE) : after;
            pack_keys<M, D>(k_, places, next, buffers.keys);
            pack_values<M, D>(v_, places, next, buffers.values);
            // a token sees itself and what comes before it; those before `first` see nothing of this tile
            const int blind = std::max<int64_t>(0, first - task.position) * group_;
            for (int r = blind; r < rows(task); r++)
                buffers.seen[r] = std::min<int64_t>(places.n, task.position + r / group_ + 1 - first);
            attend_tile<M, D>(blind, rows(task), buffers.queries, buffers.keys, buffers.values, buffers.seen,
                              shape_.scale, state);
        }
    }

    void finish(const Task& task, const State& state) const {
        for (int r = 0; r < rows(task); r++) {
            const int64_t place = row(task, r / group_) + r % group_ * D;
            // a sequence of no tokens is padding
            const float scale = state.totals[r] > 0 ? 1.0f / state.totals[r] : 0.0f;
            if (q_.are_bf16)
                copy(state.sums + r * D, scale, 1, (bf16*)q_.out + place);
            else
                copy(state.sums + r * D, scale, 1, (float*)q_.out + place);
        }
    }
};

std::vector<Task> make_tasks(const int32_t* starts, const int32_t* lengths, int64_t sequences, const Shape& shape) {
    std::vector<Task> tasks;
    const int64_t most = std::max<int64_t>(1, ROWS / (shape.heads / shape.kv_heads));
    for (int64_t b = 0; b < sequences; b++)
        // from the end: the tasks that take longest first
        for (int64_t end = starts[b + 1]; end > starts[b]; end -= most) {
            const int64_t token = std::max<int64_t>(starts[b], end - most);
            const int64_t position = lengths[b] - (starts[b + 1] - token);
            for (int h = 0; h < shape.kv_heads; h++) tasks.push_back({b, token, position, int(end - token), h, -1});
        }
    return tasks;
}

// Tasks so long that the others' threads would wait for them are divided; returns how much memory their states take.
template <int D>
int64_t divide(std::vector<Task>& tasks, int group) {
    int64_t total = 0, memory = 0;
    for (const Task& task : tasks) total += task.parts() * task.tokens;
    for (Task& task : tasks)
        if (task.parts() > 1 && task.parts() * task.tokens * TASKS * omp_get_max_threads() > total) {
            task.partial = memory;
            memory += task.parts() * state_size<D>(task.tokens * group);
        }
    return memory;
}

template <typename M, int D, typename T>
void run(const Rows& q, const T* k, const T* v, const int32_t* tables, const int32_t* starts, const int32_t* lengths,
         int64_t sequences, const Shape& shape) {
    std::vector<Task> tasks = make_tasks(starts, lengths, sequences, shape);
    const std::unique_ptr<float[]> partials(new float[divide<D>(tasks, shape.heads / shape.kv_heads)]);
    struct Piece {
        const Task* task;
        int64_t part;
    };
    std::vector<Piece> pieces;
    std::vector<const Task*> divided;
    for (const Task& task : tasks) {
        if (task.partial < 0) {
            pieces.push_back({&task, -1});
            continue;
        }
        divided.push_back(&task);
        for (int64_t i = 0; i < task.parts(); i++) pieces.push_back({&task, i});
    }
    const Attention<M, D, T> attention(q, k, v, tables, shape);
    static thread_local Scratch scratch;
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < pieces.size(); i++) {
            Places after;
            after.n = 0;
            const size_t n = i + omp_get_num_threads();
            if (n < pieces.size()) after = attention.find(*pieces[n].task, std::max<int64_t>(0, pieces[n].part) * PART);
            if (pieces[i].part < 0)
                attention.whole(*pieces[i].task, after, scratch);
            else
                attention.part(*pieces[i].task, pieces[i].part, after, scratch, partials.get());
        }
        if (!divided.empty()) {
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < divided.size(); i++) attention.join(*divided[i], scratch, partials.get());
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

// Returns 0, or 1 where there is no kernel for this head_dim.
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
