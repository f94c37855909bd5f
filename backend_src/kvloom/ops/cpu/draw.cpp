// Samples a token of each row by temperature, min-p, top-k and top-p, without a sort. ops/sampling.py defines results.
//
// A token's weight is an integer, so that sums are the same in any order. Tokens are ranked by their distance below the
// largest score. To find the token at which a count or a weight is reached, buckets of distances are tallied, and then
// the tokens of one bucket (radix selection, as in RadiK or AIR Top-K, Zhang et al., 2023).
#pragma GCC optimize("fp-contract=off")  // weights must have the same bits as torch's separate operations
#include <cfloat>
#include <cmath>
#include <vector>

#include "common.h"
#include "ranking.h"

namespace {

constexpr float IMPOSSIBLE = __builtin_inff();
constexpr int64_t BLOCK = 1024;  // tokens per partial sum when sampling from all tokens
constexpr int64_t BUCKETS = 2048;
constexpr size_t FEW = 64;  // up to this many tokens are sorted

struct Tally {
    int64_t mass = 0, count = 0;
    int64_t by(bool count_them) const { return count_them ? count : mass; }
    void add(const Tally& other) { mass += other.mass, count += other.count; }
};

// A ranked token, with the number and the weight of all tokens up to and including it.
struct Place {
    int64_t token;
    Tally sum;
};

struct Draw {
    float temperature, furthest;  // tokens at a larger distance are impossible
    int64_t top_k;
    float top_p;
    double uniform;
};

// The weight at a distance: 2^42 for the most likely token.
inline int64_t weight(float below) { return (int64_t)(exp_below(below) * 0x1p42f); }

inline int32_t bucket_of(float below, float scale) {
    const float x = below * scale;
    return (int32_t)(x < (float)(BUCKETS - 1) ? x : (float)(BUCKETS - 1));
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The first bucket at which the target is reached. sum gets the total of the buckets before it.
int64_t reached(const Tally* tallies, bool by_count, int64_t target, Tally& sum) {
    int64_t bucket = 0;
    while (sum.by(by_count) + tallies[bucket].by(by_count) < target) sum.add(tallies[bucket++]);
    return bucket;
}

class Row {
  public:
    int64_t draw(const float* scores, int64_t vocab, const Draw& how) {
        count_ = vocab;
        tops_.resize(groups_in(vocab));
        // adding 0 turns -0 into 0, so that no distance is -0
        const float peak = largest_of(scores, vocab, tops_.data()) + 0.0f;
        if (peak == -__builtin_inff()) return 0;
        const float heat = std::max(how.temperature, FLT_MIN);
        const float farthest = lay_out(scores, peak, heat, how.furthest);
        const bool limited = how.top_k < vocab;
        if (limited || how.top_p < 1.0f) return draw_ranked(peak, heat, how, limited, farthest);
        sum_blocks();
        return draw_any(how.uniform);
    }

  private:
    int64_t count_ = 0;
    std::vector<float> tops_, below_;
    std::vector<int64_t> blocks_;
    std::vector<Tally> tallies_ = std::vector<Tally>(BUCKETS + GROUP), finer_ = std::vector<Tally>(BUCKETS);
    std::vector<uint64_t> members_;  // the distance's bits, then the token, so that they sort by rank
    size_t size_ = 0;                // the number of members
    float cut_ = 0, scale_ = 0;

    // Computes the distances of all tokens. Returns the largest one of a possible token.
    float lay_out(const float* scores, float peak, float heat, float furthest) {
        below_.resize(count_);
        float* below = below_.data();
        float farthest = 0.0f;
#pragma omp simd reduction(max : farthest)
        for (int64_t i = 0; i < count_; i++) {
            const float distance = (peak - scores[i]) / heat;
            const bool possible = distance <= furthest;
            below[i] = possible ? distance : IMPOSSIBLE;
            const float known = possible ? distance : 0.0f;
            farthest = farthest > known ? farthest : known;
        }
        return farthest;
    }

    int64_t sum_blocks() {
        blocks_.clear();
        int64_t whole = 0;
        for (int64_t start = 0; start < count_; start += BLOCK) {
            const float* below = below_.data() + start;
            const int64_t size = std::min(BLOCK, count_ - start);
            int64_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < size; i++) sum += weight(below[i]);
            blocks_.push_back(sum);
            whole += sum;
        }
        return whole;
    }

    static int64_t drawn_of(double uniform, int64_t kept) {
        return std::min((int64_t)(uniform * (double)kept), kept - 1);
    }

    // Inverts the cumulative distribution by id.
    int64_t draw_any(double uniform) const {
        int64_t whole = 0;
        for (const int64_t sum : blocks_) whole += sum;
        int64_t left = drawn_of(uniform, whole);
        size_t block = 0;
        while (left >= blocks_[block]) left -= blocks_[block++];
        int64_t token = (int64_t)block * BLOCK;
        for (int64_t here; left >= (here = weight(below_[token])); token++) left -= here;
        return token;
    }

    // Inverts the cumulative distribution by rank, over the tokens that top-k and then top-p keep.
    int64_t draw_ranked(float peak, float heat, const Draw& how, bool limited, float farthest) {
        int64_t whole = 0;
        cut_ = farthest;
        if (!limited) {
            // tokens that together weigh less than top-p removes are not in the nucleus
            whole = sum_blocks();
            const double spare = (double)(whole - nucleus(how.top_p, whole)) / count_;
            if (spare > 0.0) cut_ = std::min(cut_, (float)(std::log(0x1p42 / spare) + 1e-3));
        } else if (how.top_k <= (int64_t)tops_.size()) {
            const float bound = reached_by(tops_.data(), tops_.size(), how.top_k);
            cut_ = std::min(cut_, (peak - bound) / heat);
        }
        const Tally found = limited ? tally<true>() : tally<false>();
        if (limited) whole = how.top_k < found.count ? reach(true, how.top_k).sum.mass : found.mass;
        int64_t kept = whole;
        if (how.top_p < 1.0f) kept = reach(false, nucleus(how.top_p, whole)).sum.mass;
        return reach(false, drawn_of(how.uniform, kept) + 1).token;
    }

    // The weight of the nucleus. The token at which it is reached belongs to the nucleus.
    static int64_t nucleus(float top_p, int64_t whole) {
        return std::max<int64_t>((int64_t)std::ceil((double)top_p * (double)whole), 1);
    }

    // Tallies the tokens within the cut in buckets of equal width and returns their total. Only top-k needs counts.
    template <bool COUNTED>
    Tally tally() {
        scale_ = cut_ > 0.0f ? std::min((float)(BUCKETS - 1) / cut_, FLT_MAX) : 0.0f;
        std::fill(tallies_.begin(), tallies_.end(), Tally{});
        each_group([](float) { return true; }, [&](const float* below, int64_t, int64_t size) {
            int64_t masses[GROUP];
            int32_t buckets[GROUP];
#pragma omp simd
            for (int64_t i = 0; i < size; i++) {
                masses[i] = weight(below[i]);
                // one bucket per lane, since repeated additions to one bucket would wait for each other
                buckets[i] = below[i] <= cut_ ? bucket_of(below[i], scale_) : (int32_t)(BUCKETS + i);
            }
            Tally* tallies = tallies_.data();
            for (int64_t i = 0; i < size; i++) {
                tallies[buckets[i]].mass += masses[i];
                if constexpr (COUNTED) tallies[buckets[i]].count++;
            }
        });
        Tally found;
        for (int64_t b = 0; b < BUCKETS; b++) found.add(tallies_[b]);
        return found;
    }

    // Calls take(distances, first token, size) for each group of neighbours with a token within the cut.
    template <typename Wanted, typename Take>
    void each_group(Wanted wanted, Take take) const {
        for (int64_t start = 0; start < count_; start += GROUP) {
            const float* below = below_.data() + start;
            const int64_t size = std::min(GROUP, count_ - start);
            int32_t any = 0;
#pragma omp simd reduction(| : any)
            for (int64_t i = 0; i < size; i++) any |= (below[i] <= cut_) & wanted(below[i]);
            if (any) take(below, start, size);
        }
    }

    // The ranked token at which the number or the weight of tokens reaches the target, or else the last tallied token.
    Place reach(bool by_count, int64_t target) {
        Tally sum;
        const int32_t bucket = (int32_t)reached(tallies_.data(), by_count, target, sum);
        const auto inside = [&](float below) { return bucket_of(below, scale_) == bucket; };
        const float* below = below_.data();
        float low = IMPOSSIBLE, high = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high)
        for (int64_t i = 0; i < count_; i++) {
            const bool member = (below[i] <= cut_) & inside(below[i]);
            const float least = member ? below[i] : IMPOSSIBLE, most = member ? below[i] : 0.0f;
            low = low < least ? low : least;
            high = high > most ? high : most;
        }
        if (low == high) return reach_equal(low, by_count, target, sum);
        members_.resize(count_);
        size_ = 0;
        each_group(inside, [&](const float* group, int64_t start, int64_t size) {
            for (int64_t i = 0; i < size; i++) {
                members_[size_] = (uint64_t)bits_of(group[i]) << 32 | (uint64_t)(start + i);
                size_ += (group[i] <= cut_) & inside(group[i]);
            }
        });
        return reach_member(by_count, target, sum);
    }

    // Like reach, among the members of one bucket, in the order of ids. sum is the total before them.
    Place reach_member(bool by_count, int64_t target, Tally sum) {
        const auto key = [](uint64_t member) { return (uint32_t)(member >> 32); };
        while (size_ > FEW) {
            uint32_t low = UINT32_MAX, high = 0;
            for (size_t m = 0; m < size_; m++) {
                low = std::min(low, key(members_[m]));
                high = std::max(high, key(members_[m]));
            }
            if (low == high) return reach_equal(float_of(low), by_count, target, sum);
            int shift = 0;
            while ((high - low) >> shift >= BUCKETS) shift++;
            std::fill(finer_.begin(), finer_.end(), Tally{});
            for (size_t m = 0; m < size_; m++)
                finer_[(key(members_[m]) - low) >> shift].add({weight(float_of(key(members_[m]))), 1});
            const uint32_t bucket = (uint32_t)reached(finer_.data(), by_count, target, sum);
            const auto outside = [&](uint64_t member) { return (key(member) - low) >> shift != bucket; };
            size_ = std::remove_if(members_.begin(), members_.begin() + size_, outside) - members_.begin();
        }
        std::sort(members_.begin(), members_.begin() + size_);
        size_t rank = 0;
        for (;; rank++) {
            sum.add({weight(float_of(key(members_[rank]))), 1});
            if (sum.by(by_count) >= target) return {(int64_t)(uint32_t)members_[rank], sum};
        }
    }

    // Like reach, if all remaining tokens have the same distance.
    Place reach_equal(float distance, bool by_count, int64_t target, Tally sum) const {
        const int64_t each = weight(distance), left = target - sum.by(by_count);
        const int64_t taken = by_count ? left : (left + each - 1) / each;
        sum.add({taken * each, taken});
        const float* below = below_.data();
        int64_t token = 0, before = 0;
        for (; token < count_; token += GROUP) {
            const int64_t end = std::min(token + GROUP, count_);
            int32_t equal = 0;
#pragma omp simd reduction(+ : equal)
            for (int64_t i = token; i < end; i++) equal += below[i] == distance;
            if (before + equal >= taken) break;
            before += equal;
        }
        while ((before += below[token] == distance) < taken) token++;
        return {token, sum};
    }
};

}  // namespace

// Samples tokens from scores [rows, vocab], whose rows are stride apart. The other arguments have one number per row.
extern "C" void kvloom_sample(const float* scores, int64_t rows, int64_t vocab, int64_t stride,
                              const float* temperature, const float* furthest, const int64_t* top_k, const float* top_p,
                              const double* uniform, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        static thread_local Row row;
        tokens[r] = row.draw(scores + r * stride, vocab, {temperature[r], furthest[r], top_k[r], top_p[r], uniform[r]});
    }
}
