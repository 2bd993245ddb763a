#include "candidates.h"

#include <algorithm>
#include <array>

#include "magnitude.h"

namespace {

constexpr int DIGIT = 11;  // bits; the counts of one digit fit into L1

int width(uint32_t x) { return x ? 32 - __builtin_clz(x) : 0; }

struct Range {
    uint32_t low, high;  // both included
};

Range range_of(const std::vector<Keys>& lists) {
    Range range = {UINT32_MAX, 0};
    for (const Keys& list : lists)
        for (int64_t i = 0; i < list.count; ++i) {
            range.low = std::min(range.low, list.data[i]);
            range.high = std::max(range.high, list.data[i]);
        }
    return range;
}

}  // namespace

Cut cut_of(const std::vector<Keys>& lists, int64_t k) {
    // A radix select whose digits begin where the keys differ: they are close to each other, and counts of
    // one place only would wait for one another.
    Range range = range_of(lists);
    for (;;) {
        const uint32_t span = range.high - range.low;
        const int shift = std::max(0, width(span) - DIGIT);
        std::array<int64_t, 1 << DIGIT> counts{};
        for (const Keys& list : lists)
            for (int64_t i = 0; i < list.count; ++i)
                if (const uint32_t above = list.data[i] - range.low; above <= span) ++counts[above >> shift];
        uint32_t digit = span >> shift;
        while (counts[digit] < k) k -= counts[digit--];
        range.low += digit << shift;
        if (shift == 0) return {range.low, k};
        range.high = std::min(range.high, range.low + ((uint32_t(1) << shift) - 1));
    }
}

void Candidates::collect(const float* x, int64_t count, int64_t k, int32_t floor, const Instructions& with) {
    // Twice k beyond a block would keep the work linear; four times seldom overflows behind a sampled floor.
    const int64_t room = std::min(count, 4 * k + BLOCK) + BLOCK;
    keys_.reset(new uint32_t[size_t(room)]);
    positions_.reset(new uint32_t[size_t(room)]);
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

// Drops all but the k largest; from then on only larger ones than the key returned count, as ties go to the first.
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
