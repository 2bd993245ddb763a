#include "candidates.h"

#include <algorithm>
#include <array>

#include "magnitude.h"

namespace {

constexpr int DIGIT = 11;  // bits at most: the counts of one digit fit into L1
constexpr int LEAST = 6;   // and at least: few keys need no more

int width(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

struct Range {
    uint32_t low, high;  // both included
};

Range range_of(const std::vector<Keys>& lists) {
    int32_t low = INT32_MAX, high = 0;  // signed: the oldest vector instructions compare nothing else
    for (const Keys& list : lists)
        for (int64_t i = 0; i < list.count; ++i) {
            low = std::min(low, int32_t(list.data[i]));
            high = std::max(high, int32_t(list.data[i]));
        }
    return {uint32_t(low), uint32_t(high)};
}

}  // namespace

Cut cut_of(const std::vector<Keys>& lists, int64_t k) {
    // A radix select whose first digit begins where the keys differ: most of them differ in it.
    const Range range = range_of(lists);
    int64_t all = 0;
    for (const Keys& list : lists) all += list.count;
    const int digits = width(uint32_t(std::clamp<int64_t>(all, 1 << (LEAST - 1), (1 << DIGIT) - 1)));
    const int shift = std::max(0, width(range.high - range.low) - digits);
    std::array<int64_t, 1 << DIGIT> counts;
    std::fill_n(counts.begin(), ((range.high - range.low) >> shift) + 1, 0);
    for (const Keys& list : lists)
        for (int64_t i = 0; i < list.count; ++i) ++counts[(list.data[i] - range.low) >> shift];
    uint32_t digit = (range.high - range.low) >> shift;
    while (counts[digit] < k) k -= counts[digit--];
    if (shift == 0) return {range.low + digit, k};
    std::vector<uint32_t> same;
    same.reserve(size_t(counts[digit]));
    for (const Keys& list : lists)
        for (int64_t i = 0; i < list.count; ++i)
            if ((list.data[i] - range.low) >> shift == digit) same.push_back(list.data[i]);
    return cut_of({{same.data(), int64_t(same.size())}}, k);
}

void Candidates::collect(const float* x, int64_t count, int64_t k, int32_t floor, const Instructions& with) {
    // Room for 2·k would keep the work linear; behind a sampled floor twice as much seldom overflows.
    const int64_t room = std::min(count, 4 * k + 8 * BLOCK) + BLOCK;
    memory_.reset(new uint32_t[2 * size_t(room)]);
    keys_ = memory_.get();
    positions_ = keys_ + room;
    size_ = 0;
    std::array<Hit, BLOCK / WORD + 1> hits;
    for (int64_t i = 0; i < count; i += BLOCK) {
        if (size_ + BLOCK > room) floor = floor_of(keep_largest(k));
        append(x + i, i, hits.data(), with.passing(x + i, std::min(BLOCK, count - i), floor, hits.data()));
    }
}

void Candidates::append(const float* x, int64_t offset, const Hit* hits, int64_t found) {
    int64_t size = size_;
    for (int64_t i = 0; i < found; ++i) {
        const int64_t first = hits[i].word * WORD;
        for (uint32_t mask = hits[i].mask; mask; mask &= mask - 1) {
            const int64_t j = first + __builtin_ctz(mask);
            keys_[size] = key(x[j]);
            positions_[size++] = uint32_t(offset + j);
        }
    }
    size_ = size;
}

// Drops all but the k largest and returns the least of these: ties go to the first, so what comes must be
// larger.
uint32_t Candidates::keep_largest(int64_t k) {
    Cut cut = cut_of({keys()}, k);
    const uint32_t least = cut.key;
    int64_t kept = 0;
    for (int64_t i = 0; kept < k; ++i) {
        const bool tie = keys_[i] == cut.key && cut.ties > 0, taken = keys_[i] > cut.key || tie;
        keys_[kept] = keys_[i];
        positions_[kept] = positions_[i];
        kept += taken;
        cut.ties -= tie;
    }
    size_ = k;
    return least;
}

Candidates::Sides Candidates::sides(uint32_t key) const {
    Sides sides = {0, 0};
    for (int64_t i = 0; i < size_; ++i) {
        sides.above += keys_[i] > key;
        sides.equal += keys_[i] == key;
    }
    return sides;
}

void Candidates::write(Cut cut, int64_t count, int64_t offset, int64_t* out) const {
    int64_t written = 0;
    for (int64_t i = 0; written < count; ++i) {  // without a branch: which ones are taken is chance
        const bool tie = keys_[i] == cut.key && cut.ties > 0, taken = keys_[i] > cut.key || tie;
        out[written] = offset + positions_[i];
        written += taken;
        cut.ties -= tie;
    }
}
