// acc += g and g = 0 in one pass that also takes the squared norms of acc's segments.
#include <algorithm>
#include <new>
#include <vector>

#include "instructions.h"
#include "kernels.h"
#include "workers.h"

namespace {

// A norm is the sum of those of pieces of the segment, in order: the same for any number of threads.
constexpr int64_t PIECE = 1 << 12;
constexpr int64_t SHARE = 1 << 18;  // elements that are worth a thread

struct Pieces {
    const int64_t* starts;
    std::vector<int64_t> first;  // of every segment, and their number

    Pieces(const int64_t* starts, int64_t segments) : starts(starts), first{0} {
        for (int64_t i = 0; i < segments; ++i) {
            const int64_t length = starts[i + 1] - starts[i];
            first.push_back(first.back() + (length + PIECE - 1) / PIECE);
        }
    }
    int64_t count() const { return first.back(); }
    int64_t segment(int64_t piece) const {
        return std::upper_bound(first.begin(), first.end(), piece) - first.begin() - 1;
    }
};

double add(float* acc, void* g, int32_t type, int64_t begin, int64_t count, const Instructions& with) {
    if (type == FLOAT32) return with.add_float32(acc + begin, static_cast<float*>(g) + begin, count);
    uint16_t* const half = static_cast<uint16_t*>(g) + begin;
    return (type == BFLOAT16 ? with.add_bfloat16 : with.add_float16)(acc + begin, half, count);
}

}  // namespace

HPCSGD_API int64_t hpcsgd_accumulate(float* acc, void* g, int32_t type, const int64_t* starts,
                                     int64_t segments, double* norms, int32_t threads, int32_t portable) try {
    const Pieces pieces(starts, segments);
    std::vector<double> sums(size_t(pieces.count()));
    const int64_t elements = starts[segments] - starts[0];
    const int64_t used = std::max<int64_t>(1, std::min<int64_t>(threads, elements / SHARE));
    const int64_t tasks = used == 1 ? 1 : std::min(pieces.count(), used * 4);
    for_each(tasks, used, [&](int64_t task) {
        const int64_t end = pieces.count() * (task + 1) / tasks;
        int64_t piece = pieces.count() * task / tasks;
        for (int64_t segment = pieces.segment(piece); piece < end; ++piece) {
            while (piece >= pieces.first[size_t(segment) + 1]) ++segment;
            const int64_t begin = starts[segment] + (piece - pieces.first[size_t(segment)]) * PIECE;
            const int64_t count = std::min(PIECE, starts[segment + 1] - begin);
            sums[size_t(piece)] = add(acc, g, type, begin, count, instructions(portable));
        }
    });
    for (int64_t i = 0; i < segments; ++i) {
        norms[i] = 0;
        for (int64_t piece = pieces.first[size_t(i)]; piece < pieces.first[size_t(i) + 1]; ++piece)
            norms[i] += sums[size_t(piece)];
    }
    return 0;
} catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
}
