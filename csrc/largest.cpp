// The k elements of largest magnitude of every segment: a floor by a sample, one pass that collects what is
// above it, an exact choice among that. The sample decides about the time only, never about the result.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "candidates.h"
#include "kernels.h"
#include "magnitude.h"
#include "workers.h"

namespace {

constexpr int64_t SHARE = 1 << 19;        // elements that are worth a thread
constexpr int64_t LONGEST = 1ll << 31;    // of a part: positions in it have 32 bits
constexpr int64_t PARTS_PER_THREAD = 4;   // so that a thread that is held up has less left to do
constexpr int64_t SAMPLED = 1 << 11;      // elements from which on a sample pays

struct Segment;

struct Part {
    Segment* of;
    int64_t begin, end;
    Candidates found{};
    int64_t count = 0, ties = 0, out = 0;  // what of `found` is taken, and where it goes
};

struct Segment {
    const float* x;
    int64_t begin, end, k, out;
    int32_t floor = NO_FLOOR;
    Cut cut{};
    std::vector<Part*> parts{};
};

// The rank in a sample of m that the floor is taken at.
int64_t sample_rank(int64_t n, int64_t k, int64_t m) {
    const double p = double(k) * double(m) / double(n);
    return int64_t(p + 4 * std::sqrt(p)) + 2;
}

// How many of n elements to look at for a floor under the k largest; 0 where that would not pay.
//
// Of a sample of m about p = k·m/n ± √p are among the k largest. A floor 4·√p below the p-th costs 4·√p·n/m
// more candidates, a larger sample more reads: their sum is least where m grows as the cube root of k·n.
int64_t sample_size(int64_t n, int64_t k) {
    const int64_t m = std::min(int64_t(std::cbrt(double(k) * double(n))) + 256, n / 4);
    return n < SAMPLED || sample_rank(n, k, m) > m / 2 ? 0 : m;
}

// The i-th of m positions in n: spread evenly, each then shifted by chance against patterns in x.
int64_t sample_position(int64_t i, int64_t n, int64_t m) {
    const int64_t stride = n / m, begin = i * stride + std::min(i, n % m);
    const uint64_t chance = uint64_t(i + 1) * 0x9e3779b97f4a7c15 >> 32;
    return begin + int64_t(uint64_t(stride) * chance >> 32);
}

// A key that somewhat more than k of n elements exceed, most likely.
int32_t sampled_floor(const float* x, int64_t n, int64_t k) {
    const int64_t m = sample_size(n, k);
    if (m == 0) return NO_FLOOR;
    std::vector<uint32_t> keys(static_cast<size_t>(m));
    for (int64_t i = 0; i < m; ++i) keys[size_t(i)] = key(x[sample_position(i, n, m)]);
    return int32_t(cut_of({{keys.data(), m}}, sample_rank(n, k, m)).key) - 1;
}

int64_t collected(const Segment& segment) {
    int64_t sum = 0;
    for (const Part* part : segment.parts) sum += part->found.keys().count;
    return sum;
}

void find_cut(Segment& segment) {
    std::vector<Keys> lists;
    for (const Part* part : segment.parts) lists.push_back(part->found.keys());
    segment.cut = cut_of(lists, segment.k);
    int64_t ties = segment.cut.ties, out = segment.out;
    for (Part* part : segment.parts) {
        const auto [above, equal] = part->found.sides(segment.cut.key);
        part->ties = std::min(ties, equal);
        part->count = above + part->ties;
        part->out = out;
        ties -= part->ties;
        out += part->count;
    }
}

void find_floor(Segment& segment) {
    segment.floor = sampled_floor(segment.x + segment.begin, segment.end - segment.begin, segment.k);
}

void collect(Part& part, const Instructions& with) {
    const int64_t n = part.end - part.begin;
    part.found.collect(part.of->x + part.begin, n, std::min(part.of->k, n), part.of->floor, with);
}

// Whether the sample was not like the rest, so that too little was collected: then all is, the next time.
bool misled(Segment& segment) {
    if (collected(segment) >= segment.k) return false;
    segment.floor = NO_FLOOR;
    return true;
}

void write(const Part& part, int64_t* out) {
    part.found.write({part.of->cut.key, part.ties}, part.count, part.begin, out + part.out);
}

// A segment by itself, so that all passes but the first find it in the cache.
void select_one(Segment& segment, int64_t* out, const Instructions& with) {
    Part part{&segment, segment.begin, segment.end};
    segment.parts = {&part};
    find_floor(segment);
    collect(part, with);
    if (misled(segment)) collect(part, with);
    find_cut(segment);
    write(part, out);
}

// Segments that are worth several threads, in parts of `length`.
void select_in_parts(const std::vector<Segment*>& segments, int64_t length, int64_t* out, int64_t threads,
                     const Instructions& with) {
    std::vector<Part> parts;
    for (Segment* segment : segments)
        for (int64_t begin = segment->begin; begin < segment->end; begin += length)
            parts.push_back({segment, begin, std::min(begin + length, segment->end)});
    for (Part& part : parts) part.of->parts.push_back(&part);
    const auto for_all = [&](const auto& tasks, const auto& task) {
        for_each(int64_t(tasks.size()), threads, [&](int64_t i) { task(tasks[size_t(i)]); });
    };
    for_all(segments, [&](Segment* segment) { find_floor(*segment); });
    for_each(int64_t(parts.size()), threads, [&](int64_t i) { collect(parts[size_t(i)], with); });
    std::vector<Part*> again;
    for (Segment* segment : segments)
        if (misled(*segment)) again.insert(again.end(), segment->parts.begin(), segment->parts.end());
    for_all(again, [&](Part* part) { collect(*part, with); });
    for_all(segments, [&](Segment* segment) { find_cut(*segment); });
    for_all(parts, [&](const Part& part) { write(part, out); });
}

}  // namespace

HPCSGD_API int64_t hpcsgd_sample(int64_t n, int64_t k, int64_t* positions) {
    const int64_t m = sample_size(n, k);
    for (int64_t i = 0; i < m; ++i) positions[i] = sample_position(i, n, m);
    return m;
}

HPCSGD_API int64_t hpcsgd_wanted(const int64_t* starts, const int64_t* stops, const int64_t* k, int64_t segments,
                                 int64_t n) {
    int64_t sum = 0, before = 0;
    for (int64_t i = 0; i < segments; ++i) {
        if (starts[i] < before || stops[i] > n) return NO_SEGMENTS;
        if (k[i] < 0 || k[i] > stops[i] - starts[i]) return NO_SEGMENTS;
        before = stops[i];
        sum += k[i];
    }
    return sum;
}

HPCSGD_API int64_t hpcsgd_largest(const float* x, const int64_t* starts, const int64_t* stops,
                                  const int64_t* k, int64_t segments, int64_t* out, int32_t threads,
                                  int32_t portable) try {
    std::vector<Segment> chosen;
    int64_t elements = 0, indices = 0;
    for (int64_t i = 0; i < segments; ++i) {
        if (k[i] == 0) continue;
        chosen.push_back({x, starts[i], stops[i], k[i], indices});
        elements += stops[i] - starts[i];
        indices += k[i];
    }
    const int64_t used = std::max<int64_t>(1, std::min<int64_t>(threads, elements / SHARE));
    const int64_t share = used == 1 ? LONGEST : std::max(SHARE, elements / (used * PARTS_PER_THREAD));
    const int64_t length = std::min(share, LONGEST);
    std::vector<Segment*> longer, shorter;
    for (Segment& segment : chosen)
        (segment.end - segment.begin > length ? longer : shorter).push_back(&segment);
    select_in_parts(longer, length, out, used, instructions(portable));
    for_each(int64_t(shorter.size()), used,
             [&](int64_t i) { select_one(*shorter[size_t(i)], out, instructions(portable)); });
    return 0;
} catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
}
