// The exact choice among the candidates of every segment, or among all its elements where the sample misjudged it.
#pragma once

#include "workspace.cuh"

constexpr int CHOOSERS = GROUP * WARP;  // a block looks at a group, each warp at a tile

constexpr int BATCH = 4;                   // elements of a tile that a thread reads at once

// A warp's part in a choice: the elements of its tile that are still in question, in order.
struct Elements {
    const float* values;
    const uint16_t* positions;  // in the tile; null where `values` are x[begin] and those behind it
    int count;
    int64_t begin;

    // The keys of this thread's elements of the BATCH·WARP from `from` on; lanes take turns. There is no branch, so
    // that loads do not wait for each other.
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
    int64_t group, groups;  // in the segment
    int64_t tile;           // of the warp, in the whole vector
    Elements elements;

    __device__ Choice(const float* vector, const Segment* table, int rows, const Workspace& work)
        : row(row_of(table, rows, blockIdx.x, &Segment::first_group)), segment(table[row]) {
        group = blockIdx.x - segment.first_group;
        groups = groups_of(segment.size);
        const int64_t number = group * GROUP + threadIdx.x / WARP;
        tile = segment.first_tile + number;
        elements = {};
        if (number >= tiles_of(segment.size)) return;
        const Tile place(vector, segment.start, segment.size, number);
        const unsigned long long candidates = work.states[row].candidates;
        if (int64_t(candidates) < segment.k || int64_t(candidates) > segment.room) {
            const int count = place.last > place.first ? place.last - place.first : 0;
            const int64_t begin = place.begin + place.first;
            elements = {vector + begin, nullptr, count, begin};
        } else {
            const List list = work.lists[tile];
            elements = {work.magnitudes + list.begin, work.positions + list.begin, list.count, place.begin};
        }
    }
    // Whether this warp has a tile, be it empty.
    __device__ bool has_tile() const { return tile - segment.first_tile < tiles_of(segment.size); }
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
            if (key > 0 && digit.counts(key, sought.prefix)) atomicAdd(&bins[digit.of(key)], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += CHOOSERS)
        if (bins[i] > 0) atomicAdd(&of_segment[i], static_cast<unsigned long long>(bins[i]));

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&state.done, 1u) + 1 == choice.groups;
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

// How many elements of every tile and group are above the k-th largest and equal to it.
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
    if (first && choice.has_tile()) work.of_tiles[choice.tile] = sum;
    const uint32_t above = block_sum<CHOOSERS>(first ? sum.above : 0, warps);
    const uint32_t equal = block_sum<CHOOSERS>(first ? sum.equal : 0, warps);
    if (threadIdx.x == 0) work.of_groups[blockIdx.x] = {above, equal};
}

struct Position {  // how many of a segment are above the k-th largest and equal to it, before some element
    unsigned long long above, equal;
};

__device__ inline Position position_of_warp(const Choice& choice, const Workspace& work) {
    __shared__ unsigned long long warps[GROUP];
    Position mine = {0, 0};
    for (int64_t i = choice.segment.first_group + threadIdx.x; i < blockIdx.x; i += CHOOSERS) {
        const Sides sides = work.of_groups[i];
        mine.above += sides.above;
        mine.equal += sides.equal;
    }
    const Position groups = {block_sum<CHOOSERS>(mine.above, warps), block_sum<CHOOSERS>(mine.equal, warps)};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool before = lane < warp && choice.has_tile();
    const Sides tile = before ? work.of_tiles[choice.tile - warp + lane] : Sides{0, 0};
    return {groups.above + warp_sum(tile.above), groups.equal + warp_sum(tile.equal)};
}

// Writes the indices, ascending. Of the elements equal to the k-th largest the first ones are taken.
__global__ void __launch_bounds__(CHOOSERS)
    write(const float* x, const Segment* table, int rows, Workspace work, int64_t* out) {
    const Choice choice(x, table, rows, work);
    const Sought sought = work.states[choice.row].sought;
    const unsigned lower = (1u << threadIdx.x % WARP) - 1;
    out += choice.segment.first_index;
    Position next = position_of_warp(choice, work);
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
