// The exact choice among the candidates of every segment, or among all its elements where the sample
// misjudged it.
#pragma once

#include "workspace.cuh"

constexpr int CHOOSERS = GROUP * WARP;  // a block looks at a group
constexpr int BATCH = 4;                // elements that a thread reads at once

// A warp's part in a choice, in order: the candidates of one tile, or where all of a segment's elements are
// in question, an equal piece of it.
struct Elements {
    const float* values;
    const uint16_t* positions;  // in the tile; null where `values` are x[begin] and those behind it
    int count;
    int64_t begin;

    // The keys of this thread's elements of the BATCH·WARP from `from` on; lanes take turns. Beyond the last
    // element they are 0, below all others. There is no branch, so that loads do not wait for each other.
    __device__ void read(int from, uint32_t (&keys)[BATCH]) const {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = place(from, b);
            const uint32_t key = key_of(values[min(i, count - 1)]);
            keys[b] = i < count ? key : 0;
        }
    }
    __device__ static int place(int from, int b) { return from + b * WARP + int(threadIdx.x % WARP); }
    __device__ int64_t index(int i) const { return begin + (positions ? positions[i] : i); }
};

struct Choice {
    int row;
    Segment segment;
    Elements elements;

    __device__ Choice(const float* x, const Segment* table, int rows, const Workspace& work)
        : row(row_of(table, rows, blockIdx.x, &Segment::first_group)), segment(table[row]) {
        const int64_t number = (blockIdx.x - segment.first_group) * GROUP + threadIdx.x / WARP;
        const int64_t candidates = int64_t(work.states[row].candidates);
        if (candidates < segment.k || candidates > segment.room) elements = piece(x, number);
        else if (number < tiles_of(segment.size)) elements = list(x, number, work);
        else elements = {nullptr, nullptr, 0, 0};
    }

    __device__ int64_t groups() const { return groups_of(segment.size); }

    __device__ Elements piece(const float* x, int64_t number) const {
        const int64_t pieces = groups() * GROUP, length = (segment.size + pieces - 1) / pieces;
        const int64_t first = number * length, last = min(first + length, segment.size);  // or last < first
        const int64_t begin = segment.start + first;
        return {x + begin, nullptr, int(last - first), begin};
    }

    __device__ Elements list(const float* x, int64_t number, const Workspace& work) const {
        const Tile tile(x, segment.start, segment.size, number);
        const List list = work.lists[segment.first_tile + number];
        return {work.magnitudes + list.begin, work.positions + list.begin, list.count, tile.begin};
    }
};

// Adds a group's counts of one digit; the last block of a segment makes the next digit of it.
__global__ void __launch_bounds__(CHOOSERS)
    count_digit(const float* x, const Segment* table, int rows, Workspace work, Digit digit) {
    __shared__ uint32_t bins[BINS];
    __shared__ unsigned long long sums[BINS];
    __shared__ bool last;
    const Choice choice(x, table, rows, work);
    State& state = work.states[choice.row];
    unsigned long long* const of_segment = work.bins + int64_t(choice.row) * BINS;
    const Sought sought = state.sought;

    for (int i = threadIdx.x; i < BINS; i += CHOOSERS) bins[i] = 0;
    __syncthreads();
    for (int from = 0; from < choice.elements.count; from += BATCH * WARP) {
        uint32_t keys[BATCH];
        choice.elements.read(from, keys);
#pragma unroll
        for (const uint32_t key : keys)
            if (digit.counts(key, sought.prefix)) atomicAdd(&bins[digit.of(key)], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += CHOOSERS)
        if (bins[i] > 0) atomicAdd(&of_segment[i], static_cast<unsigned long long>(bins[i]));

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&state.done, 1u) + 1 == choice.groups();
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < BINS; i += CHOOSERS) sums[i] = atomicExch(&of_segment[i], 0ull);
    __syncthreads();
    const Sought next = next_digit<CHOOSERS>(sums, sought, digit);
    if (threadIdx.x == 0) {
        state.sought = next;
        state.done = 0;
    }
}

// How many elements of every warp and group are above the k-th largest and equal to it.
__global__ void __launch_bounds__(CHOOSERS)
    count_sides(const float* x, const Segment* table, int rows, Workspace work) {
    __shared__ uint32_t warps[GROUP];
    const Choice choice(x, table, rows, work);
    const uint32_t key = work.states[choice.row].sought.prefix;
    Sides mine = {0, 0};
    for (int from = 0; from < choice.elements.count; from += BATCH * WARP) {
        uint32_t keys[BATCH];
        choice.elements.read(from, keys);
#pragma unroll
        for (const uint32_t other : keys) {
            mine.above += other > key;
            mine.equal += other == key;
        }
    }
    const Sides sum = {warp_sum(mine.above), warp_sum(mine.equal)};
    const bool first = threadIdx.x % WARP == 0;
    if (first) work.of_warps[int64_t(blockIdx.x) * GROUP + threadIdx.x / WARP] = sum;
    const uint32_t above = block_sum<CHOOSERS>(first ? sum.above : 0, warps);
    const uint32_t equal = block_sum<CHOOSERS>(first ? sum.equal : 0, warps);
    if (threadIdx.x == 0) {
        work.above[blockIdx.x] = above;
        work.equal[blockIdx.x] = equal;
    }
}

// A block for each segment: its groups' counts become those of the groups before, so that no group has to look
// at all others.
__global__ void __launch_bounds__(CHOOSERS) add_up_groups(const Segment* table, Workspace work) {
    __shared__ unsigned long long warps[GROUP];
    const Segment segment = table[blockIdx.x];
    const int64_t groups = groups_of(segment.size);
    add_up<CHOOSERS>(work.above + segment.first_group, groups, warps);
    add_up<CHOOSERS>(work.equal + segment.first_group, groups, warps);
}

struct Position {  // how many of a segment are above the k-th largest and equal to it, before some element
    unsigned long long above, equal;
};

__device__ inline Position position_of_warp(const Workspace& work) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Sides lower = lane < warp ? work.of_warps[int64_t(blockIdx.x) * GROUP + lane] : Sides{0, 0};
    return {work.above[blockIdx.x] + warp_sum(lower.above), work.equal[blockIdx.x] + warp_sum(lower.equal)};
}

// Writes the indices, ascending. Of the elements equal to the k-th largest the first ones are taken.
__global__ void __launch_bounds__(CHOOSERS)
    write_chosen(const float* x, const Segment* table, int rows, Workspace work, int64_t* out) {
    const Choice choice(x, table, rows, work);
    const Sought sought = work.states[choice.row].sought;
    const unsigned lower = (1u << threadIdx.x % WARP) - 1;
    out += choice.segment.first_index;
    Position next = position_of_warp(work);
    for (int from = 0; from < choice.elements.count; from += BATCH * WARP) {
        uint32_t keys[BATCH];
        choice.elements.read(from, keys);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const bool above = keys[b] > sought.prefix, equal = keys[b] == sought.prefix;
            const unsigned all_above = __ballot_sync(ALL, above), all_equal = __ballot_sync(ALL, equal);
            const unsigned long long equal_before = next.equal + __popc(all_equal & lower);
            if (above || (equal && equal_before < sought.rank))
                out[next.above + __popc(all_above & lower) + min(equal_before, sought.rank)] =
                    choice.elements.index(Elements::place(from, b));
            next.above += __popc(all_above);
            next.equal += __popc(all_equal);
        }
    }
}
