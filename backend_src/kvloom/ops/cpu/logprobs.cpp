// Log probabilities of the chosen and the most likely tokens, in one pass over each row.
#include <cmath>
#include <vector>

#include "common.h"
#include "ranking.h"

namespace {

constexpr int64_t BLOCK = 256;  // exponentials to sum in fp32 before adding to fp64

struct Scored {
    float score;
    int64_t token;
    bool operator<(const Scored& other) const {
        return score > other.score || (score == other.score && token < other.token);
    }
};

double log_of_sum(const float* scores, int64_t count, float peak) {
    double whole = 0.0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t end = std::min(start + BLOCK, count);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = start; i < end; i++) sum += exp_below(peak - scores[i]);
        whole += sum;
    }
    return peak + std::log(whole);
}

// Candidates: scores that include the k largest.
void collect(const float* scores, int64_t count, float bound, std::vector<Scored>& found) {
    found.clear();
    for (int64_t start = 0; start < count; start += GROUP) {
        const int64_t end = std::min(start + GROUP, count);
        int32_t any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t i = start; i < end; i++) any |= scores[i] >= bound;
        if (!any) continue;
        for (int64_t i = start; i < end; i++)
            if (scores[i] >= bound) found.push_back({scores[i], i});
    }
}

}  // namespace

// From logits [rows, vocab] and tokens [rows] computes the tokens' log probabilities, own [rows], and those of the k
// most likely tokens with their ids, values and ids [rows, k], k <= vocab. Of equal logits the smaller id is first.
extern "C" void kvloom_logprobs(const float* logits, int64_t rows, int64_t vocab, const int64_t* tokens, int64_t k,
                                float* own, float* values, int64_t* ids) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        static thread_local std::vector<float> tops;
        static thread_local std::vector<Scored> found;
        const float* row = logits + r * vocab;
        tops.resize(groups_in(vocab));
        const float peak = largest_of(row, vocab, tops.data());
        const double normalizer = log_of_sum(row, vocab, peak);
        own[r] = (float)(row[tokens[r]] - normalizer);
        if (!k) continue;
        const int64_t groups = (int64_t)tops.size();
        collect(row, vocab, k <= groups ? reached_by(tops.data(), groups, k) : -__builtin_inff(), found);
        std::partial_sort(found.begin(), found.begin() + k, found.end());
        for (int64_t i = 0; i < k; i++) {
            values[r * k + i] = (float)(found[i].score - normalizer);
            ids[r * k + i] = found[i].token;
        }
    }
}
