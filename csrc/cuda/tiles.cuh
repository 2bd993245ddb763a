// How a flat vector of segments is divided among blocks of threads, and its elements read four at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr int VECTOR = 4;                    // float32 in 128 bits
constexpr int QUADS = 8;                     // vectors a thread holds, so that many loads are in flight
constexpr int ROW = WARP * VECTOR;           // what a warp reads at once
constexpr int SHARE = QUADS * ROW;           // elements of a tile that one warp reads
constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;        // of the kernels that read whole tiles
constexpr int TILE = WARPS * SHARE;
constexpr int GROUP = 16;                    // tiles

// A row of the table that hpcsgd/kernels/cuda.py makes on the host. No row is empty (size > 0).
struct Segment {
    int64_t start, size;
    int64_t k;                // how many to choose
    int64_t rank;             // which of the sample's keys is the threshold; 0: all elements are candidates
    int64_t room;             // for candidates; 0 where rank is 0
    int64_t first_tile, first_group, first_candidate, first_index;  // sums over the rows before
};

// Tiles begin at multiples of 16 bytes, up to three elements before the segment: one more may be needed.
__host__ __device__ inline int64_t tiles_of(int64_t size) { return (size + VECTOR - 1 + TILE - 1) / TILE; }
__host__ __device__ inline int64_t groups_of(int64_t size) { return (tiles_of(size) + GROUP - 1) / GROUP; }

// The row whose tiles (or groups) a block's number falls into.
__device__ inline int row_of(const Segment* table, int rows, int64_t number, int64_t Segment::*first) {
    int low = 0, high = rows;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table[middle].*first <= number) low = middle;
        else high = middle;
    }
    return low;
}

// Position p of a tile is x[begin + p]; the segment has those in [first, last).
struct Tile {
    int64_t begin;
    int first, last;

    __device__ Tile(const float* x, int64_t start, int64_t size, int64_t tile) {
        const int lead = int((reinterpret_cast<uintptr_t>(x + start) / sizeof(float)) % VECTOR);
        const int64_t stop = start + size;
        begin = start - lead + tile * TILE;
        first = tile == 0 ? lead : 0;
        last = stop - begin < TILE ? int(stop - begin) : TILE;  // negative: begins behind the last element
    }
    __device__ bool full() const { return first == 0 && last == TILE; }
    __device__ bool has(int position) const { return first <= position && position < last; }
};

// The place of this thread's vector `quad` in a tile: a warp's vectors lie side by side.
__device__ inline int place_of(int quad) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return warp * SHARE + quad * ROW + lane * VECTOR;
}

// Keys are ordered as magnitudes are: 1 for ±0, then finite, infinity, one for all NaNs. 0 is no element.
constexpr uint32_t NAN_BITS = 0x7f800001, ZERO_KEY = 1;

__device__ inline uint32_t key_of(float x) { return min(__float_as_uint(x) & 0x7fffffffu, NAN_BITS) + 1; }

// The magnitude with that key.
__device__ inline float magnitude_of(uint32_t key) { return __uint_as_float(key - 1); }

struct Keys {
    uint32_t of[VECTOR];
};

__device__ inline Keys keys_at(const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    return {{key_of(four.x), key_of(four.y), key_of(four.z), key_of(four.w)}};
}

// This thread's part of a tile. The first loop is without a branch, so that its loads do not wait for each
// other.
__device__ inline void read_keys(const float* x, const Tile& tile, Keys (&keys)[QUADS]) {
    x += tile.begin;
    if (tile.full()) {
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) keys[quad] = keys_at(x + place_of(quad));
        return;
    }
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const int place = place_of(quad) + i;
            keys[quad].of[i] = tile.has(place) ? key_of(x[place]) : 0;
        }
}

// Which elements of a warp's row pass: bit l of word i is that of lane l's element i.
struct Passing {
    uint32_t lanes[VECTOR];

    __device__ int count() const {
        return __popc(lanes[0]) + __popc(lanes[1]) + __popc(lanes[2]) + __popc(lanes[3]);
    }
    __device__ bool has(int lane, int i) const { return lanes[i] >> lane & 1; }
    // How many pass before the lane's first element.
    __device__ int before(int lane) const {
        const uint32_t lower = (1u << lane) - 1;
        return __popc(lanes[0] & lower) + __popc(lanes[1] & lower) + __popc(lanes[2] & lower) +
               __popc(lanes[3] & lower);
    }
};

__device__ inline Passing passing(const Keys& keys, uint32_t threshold) {
    Passing result;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) result.lanes[i] = __ballot_sync(ALL, keys.of[i] >= threshold);
    return result;
}
