// Plans an attention's work for threads: tasks, and parts of long tasks.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention_tile.h"

namespace {

constexpr int PART = 256;  // the least keys per thread
constexpr int ROWS = 192;  // rows of queries per packed tile
constexpr int TASKS = 4;   // tasks per thread, enough so that no thread waits long for the last one
static_assert(PART % TILE == 0);

struct Shape {
    int64_t heads, kv_heads, block_size, block_stride, table_stride;
    float scale;
};

// Some neighbouring queries of a sequence and the query heads of one KV head; in a decode, of several.
struct Task {
    int64_t sequence, token, position;
    int tokens, kv_head, kv_heads;
    bool decode;
    int64_t partial;  // where its parts' states begin, if several threads share it; else -1

    int64_t parts() const { return (std::max<int64_t>(0, position + tokens) + PART - 1) / PART; }

    // The number of keys in the tile that begins with key `first`. The tiles of a decode's part are about equally long,
    // because each tile prefetches the next one and memory should always be busy.
    int tile(int64_t first) const {
        // padding has no keys
        const int64_t left = std::max<int64_t>(0, position + tokens - first);
        if (!decode) return std::min<int64_t>(left, TILE);
        const int64_t before = first % PART, keys = std::min<int64_t>(before + left, PART);
        const int64_t step = LANES * std::max<int64_t>(1, (keys + TILE - 1) / TILE);
        return std::min((keys + step - 1) / step * LANES, keys - before);
    }
};

// The number of floats in the online softmax's state of some rows.
constexpr int64_t state_size(int64_t rows, int64_t head_dim) {
    return rows * (head_dim + 2);
}

// The work, which free threads take.
struct Plan {
    struct Piece {
        const Task* task;
        int64_t part;  // -1 for the whole task

        int64_t first() const { return std::max<int64_t>(0, part) * PART; }  // the first key
    };
    std::vector<Task> tasks;
    std::vector<Piece> pieces;
    std::vector<const Task*> divided;

    // Returns the number of floats for the states of all parts. With `decodes`, single queries are decodes.
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
        // A block's heads are contiguous, so a task should have all of them, unless there are too few tasks
        const int together = sequences >= TASKS * omp_get_max_threads() ? shape.kv_heads : 1;
        const int64_t most = std::max<int64_t>(1, ROWS / (shape.heads / shape.kv_heads));
        for (int64_t b = 0; b < sequences; b++) {
            if (decodes && starts[b + 1] - starts[b] == 1) {
                for (int h = 0; h < shape.kv_heads; h += together)
                    tasks.push_back({b, starts[b], lengths[b] - 1, 1, h, together, true, -1});
                continue;
            }
            // from the end, so that the longest tasks come first
            for (int64_t end = starts[b + 1]; end > starts[b]; end -= most) {
                const int64_t token = std::max<int64_t>(starts[b], end - most);
                const int64_t position = lengths[b] - (starts[b + 1] - token);
                for (int h = 0; h < shape.kv_heads; h++)
                    tasks.push_back({b, token, position, int(end - token), h, 1, false, -1});
            }
        }
    }

    // Splits tasks that are so long that other threads would wait for them.
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
