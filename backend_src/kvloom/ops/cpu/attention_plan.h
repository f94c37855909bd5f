// Which thread computes what of an attention: tasks, and parts of long ones.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention_tile.h"

namespace {

constexpr int PART = 256;  // keys that one thread computes at least
constexpr int ROWS = 192;  // rows of queries that a packed tile is used for
constexpr int TASKS = 4;   // per thread: so many that none waits long for the last one
static_assert(PART % TILE == 0);

struct Shape {
    int64_t heads, kv_heads, block_size, block_stride, table_stride;
    float scale;
};

// Some neighbouring queries of a sequence and the query heads of one KV head, or of some if it is a decode.
struct Task {
    int64_t sequence, token, position;
    int tokens, kv_head, kv_heads;
    bool decode;
    int64_t partial;  // where the states of its parts are kept, if it is divided among threads; else -1

    int64_t parts() const { return (std::max<int64_t>(0, position + tokens) + PART - 1) / PART; }

    // How many keys the tile has that begins with key `first`. Those of a decode's part are about equally long: what is
    // asked for during one tile is needed by the next, and memory is to be busy all the time.
    int tile(int64_t first) const {
        // padding ends before its first key
        const int64_t left = std::max<int64_t>(0, position + tokens - first);
        if (!decode) return std::min<int64_t>(left, TILE);
        const int64_t before = first % PART, keys = std::min<int64_t>(before + left, PART);
        const int64_t step = LANES * std::max<int64_t>(1, (keys + TILE - 1) / TILE);
        return std::min((keys + step - 1) / step * LANES, keys - before);
    }
};

// Numbers in the online softmax's state of some rows.
constexpr int64_t state_size(int64_t rows, int64_t head_dim) {
    return rows * (head_dim + 2);
}

// What is to be computed, by whichever thread is free.
struct Plan {
    struct Piece {
        const Task* task;
        int64_t part;  // -1: all

        int64_t first() const { return std::max<int64_t>(0, part) * PART; }  // key
    };
    std::vector<Task> tasks;
    std::vector<Piece> pieces;
    std::vector<const Task*> divided;

    // Returns how many numbers the states of parts take; with `decodes`, single queries are decodes.
    int64_t make(const int32_t* starts, const int32_t* lengths, int64_t sequences, const Shape& shape,
                 int64_t head_dim, bool decodes) {
        tasks.clear(), pieces.clear(), divided.clear();
        add_tasks(starts, lengths, sequences, shape, decodes);
        const int64_t memory = divide(shape.heads / shape.kv_heads, head_dim);
        for (const Task& task : tasks) {
            if (task.partial < 0) {
                pieces.push_back({&task, -1});
                continue;
            }
            divided.push_back(&task);
            for (int64_t i = 0; i < task.parts(); i++) pieces.push_back({&task, i});
        }
        return memory;
    }

private:
    void add_tasks(const int32_t* starts, const int32_t* lengths, int64_t sequences, const Shape& shape,
                   bool decodes) {
        // all heads of a block lie side by side: few sequences are divided nevertheless, for there to be enough tasks
        const int together = sequences >= TASKS * omp_get_max_threads() ? shape.kv_heads : 1;
        const int64_t most = std::max<int64_t>(1, ROWS / (shape.heads / shape.kv_heads));
        for (int64_t b = 0; b < sequences; b++) {
            if (decodes && starts[b + 1] - starts[b] == 1) {
                for (int h = 0; h < shape.kv_heads; h += together)
                    tasks.push_back({b, starts[b], lengths[b] - 1, 1, h, together, true, -1});
                continue;
            }
            // from the end: the tasks that take longest first
            for (int64_t end = starts[b + 1]; end > starts[b]; end -= most) {
                const int64_t token = std::max<int64_t>(starts[b], end - most);
                const int64_t position = lengths[b] - (starts[b + 1] - token);
                for (int h = 0; h < shape.kv_heads; h++)
                    tasks.push_back({b, token, position, int(end - token), h, 1, false, -1});
            }
        }
    }

    // Tasks so long that the others' threads would wait for them are divided.
    int64_t divide(int group, int64_t head_dim) {
        const auto work = [](const Task& task) { return task.parts() * task.tokens * task.kv_heads; };
        int64_t total = 0, memory = 0;
        for (const Task& task : tasks) total += work(task);
        for (Task& task : tasks)
            if (task.parts() > 1 && work(task) * TASKS * omp_get_max_threads() > total) {
                task.partial = memory;
                memory += task.parts() * state_size(task.tokens * group * task.kv_heads, head_dim);
            }
        return memory;
    }
};

}  // namespace
