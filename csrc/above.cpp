// The elements whose magnitude reaches a threshold.
#include <algorithm>
#include <array>
#include <new>
#include <vector>

#include "instructions.h"
#include "kernels.h"
#include "magnitude.h"
#include "workers.h"

namespace {

constexpr int64_t PART = 1 << 20;

void find(const float* x, int64_t begin, int64_t end, int32_t floor, const Instructions& with,
          std::vector<int64_t>& found) {
    std::array<Hit, BLOCK / WORD + 1> hits;
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int64_t words = with.passing(x + i, std::min(BLOCK, end - i), floor, hits.data());
        for (int64_t w = 0; w < words; ++w)
            for (uint32_t mask = hits[size_t(w)].mask; mask; mask &= mask - 1)
                found.push_back(i + hits[size_t(w)].word * WORD + __builtin_ctz(mask));
    }
}

}  // namespace

HPCSGD_API int64_t hpcsgd_above(const float* x, int64_t n, float threshold, int64_t* out, int64_t room,
                                int32_t threads, int32_t portable) try {
    const int32_t floor = threshold > 0 ? int32_t(magnitude_bits(threshold)) - 1 : NO_FLOOR;
    std::vector<std::vector<int64_t>> found(size_t((n + PART - 1) / PART));
    for_each(int64_t(found.size()), threads, [&](int64_t i) {
        find(x, i * PART, std::min(n, (i + 1) * PART), floor, instructions(portable), found[size_t(i)]);
    });
    int64_t count = 0;
    for (const auto& part : found) count += int64_t(part.size());
    if (count > room) return count;
    for (const auto& part : found) out = std::copy(part.begin(), part.end(), out);
    return count;
} catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
}
