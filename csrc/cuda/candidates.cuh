// The candidates of every segment: those not below a threshold that a sample gives, in one pass over the
// vector.
#pragma once

#include "workspace.cuh"

constexpr int SAMPLERS = 1024;
constexpr int EACH_SAMPLES = 8;
constexpr int SAMPLE_BITS = 13;
constexpr int SAMPLE = 1 << SAMPLE_BITS;
static_assert(SAMPLERS * EACH_SAMPLES == SAMPLE);

// One place in each of as many equal stretches; where in it is the same at every call, but without a pattern.
__host__ __device__ inline int64_t sampled_place(int64_t size, int64_t i) {
    const int64_t begin = size * i >> SAMPLE_BITS, end = size * (i + 1) >> SAMPLE_BITS;
    uint32_t chance = uint32_t(i) * 0x9e3779b9u;
    chance = (chance ^ chance >> 16) * 0x85ebca6bu;
    chance ^= chance >> 13;
    return begin + int64_t(uint64_t(chance) * uint64_t(end - begin) >> 32);
}

// Zeros are no candidates: there may be many of them where there are few others, and more of those than k.
__device__ inline uint32_t sampled_threshold(const float* x, const Segment& segment) {
    __shared__ uint32_t bins[BINS];
    uint32_t keys[EACH_SAMPLES];
#pragma unroll
    for (int i = 0; i < EACH_SAMPLES; ++i)
        keys[i] = key_of(x[segment.start + sampled_place(segment.size, i * SAMPLERS + int(threadIdx.x))]);
    Sought sought = {0, static_cast<unsigned long long>(segment.rank)};
    for (int d = 0; d < DIGITS; ++d) {
        const Digit digit = digit_number(d);
        for (int i = threadIdx.x; i < BINS; i += SAMPLERS) bins[i] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < EACH_SAMPLES; ++i)
            if (digit.counts(keys[i], sought.prefix)) atomicAdd(&bins[digit.of(keys[i])], 1u);
        __syncthreads();
        sought = next_digit<SAMPLERS>(bins, sought, digit);
    }
    return max(sought.prefix, ZERO_KEY + 1);
}

// A block for each segment, which also clears what later kernels add to.
__global__ void __launch_bounds__(SAMPLERS) sample(const float* x, const Segment* table, Workspace work) {
    const Segment segment = table[blockIdx.x];
    unsigned long long* const bins = work.bins + int64_t(blockIdx.x) * BINS;
    for (int i = threadIdx.x; i < BINS; i += SAMPLERS) bins[i] = 0;
    const uint32_t threshold = segment.rank > 0 ? sampled_threshold(x, segment) : 0;
    if (threadIdx.x == 0)
        work.states[blockIdx.x] = {threshold, 0, 0, {0, static_cast<unsigned long long>(segment.k)}};
}

// A block for each tile. Tiles take their part of the candidates' memory in any order, and lists tell where;
// whether all of a segment's candidates have room does not depend on the order.
__global__ void __launch_bounds__(THREADS, 4)
    collect(const float* x, const Segment* table, int rows, Workspace work) {
    __shared__ int counts[WARPS];
    __shared__ unsigned long long taken;
    const int row = row_of(table, rows, blockIdx.x, &Segment::first_tile);
    const Segment segment = table[row];
    if (segment.rank == 0) return;
    const Tile tile(x, segment.start, segment.size, blockIdx.x - segment.first_tile);
    const uint32_t threshold = work.states[row].threshold;

    Keys keys[QUADS];
    read_keys(x, tile, keys);
    int mine = 0;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) mine += keys[quad].of[i] >= threshold;

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int of_warp = warp_sum(mine);
    if (lane == 0) counts[warp] = of_warp;
    __syncthreads();
    int before = 0, total = 0;
    for (int i = 0; i < WARPS; ++i) {
        before += i < warp ? counts[i] : 0;
        total += counts[i];
    }
    if (threadIdx.x == 0) {
        unsigned long long& candidates = work.states[row].candidates;
        taken = total > 0 ? atomicAdd(&candidates, static_cast<unsigned long long>(total)) : 0;
        work.lists[blockIdx.x] = {segment.first_candidate + int64_t(taken), total};
    }
    __syncthreads();
    if (of_warp == 0 || int64_t(taken) + total > segment.room) return;

    int64_t next = segment.first_candidate + int64_t(taken) + before;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        const Passing found = passing(keys[quad], threshold);
        int64_t to = next + found.before(lane);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (found.has(lane, i)) {
                work.magnitudes[to] = magnitude_of(keys[quad].of[i]);
                work.positions[to++] = uint16_t(place_of(quad) + i);
            }
        next += found.count();
    }
}
