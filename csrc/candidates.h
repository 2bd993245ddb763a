// The elements that may be among the largest, and the exact choice among them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "instructions.h"

// What belongs to the k largest: all keys above `key`, and the first `ties` that equal it.
struct Cut {
    uint32_t key;
    int64_t ties;
};

struct Keys {
    const uint32_t* data;
    int64_t count;
};

// The cut of the k largest of all keys in `lists`; 0 < k <= how many there are.
Cut cut_of(const std::vector<Keys>& lists, int64_t k);

// Keys and positions of one stretch of x, positions ascending.
class Candidates {
   public:
    // Collects what is above `floor` in x[0 : count], count < 2^32, or at least the k largest of it, k > 0.
    void collect(const float* x, int64_t count, int64_t k, int32_t floor, const Instructions& with);

    Keys keys() const { return {keys_, size_}; }

    // How many keys are above and equal to that of `cut`.
    struct Sides {
        int64_t above, equal;
    };
    Sides sides(uint32_t key) const;

    // Writes, plus `offset`, the `count` positions that are above the cut or among its first `ties`.
    void write(Cut cut, int64_t count, int64_t offset, int64_t* out) const;

   private:
    void append(const float* x, int64_t offset, const Hit* hits, int64_t found);
    uint32_t keep_largest(int64_t k);

    std::unique_ptr<uint32_t[]> memory_;
    uint32_t *keys_ = nullptr, *positions_ = nullptr;
    int64_t size_ = 0;
};
