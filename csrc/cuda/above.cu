// The elements whose magnitude reaches a threshold: one pass marks them with a bit each, a second one reads
// the bits alone. In between the host has to be told how many there are.
#include <cstring>

#include "device.cuh"
#include "kernels.cuh"
#include "sums.cuh"

namespace {

constexpr int ROWS = TILE / ROW;
constexpr int ADDERS = 1024;

struct Marks {
    int64_t* total;
    int64_t* before;  // of every tile: first its count, then that of all tiles before it
    Passing* rows;    // ROWS of every tile
};

int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

Marks marks_in(void* memory, int64_t tiles) {
    int64_t* const numbers = static_cast<int64_t*>(memory);
    char* const rows = static_cast<char*>(memory) + aligned((1 + tiles) * int64_t(sizeof(int64_t)));
    return {numbers, numbers + 1, reinterpret_cast<Passing*>(rows)};
}

uint32_t threshold_key(float threshold) {
    uint32_t bits;
    std::memcpy(&bits, &threshold, sizeof bits);
    return threshold > 0 ? bits + 1 : 1;
}

__global__ void __launch_bounds__(THREADS) mark(const float* x, int64_t n, uint32_t threshold, Marks marks) {
    __shared__ int warps[WARPS];
    const Tile tile(x, 0, n, blockIdx.x);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Keys keys[QUADS];
    read_keys(x, tile, keys);
    int count = 0;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        const Passing found = passing(keys[quad], threshold);
        if (lane == 0) marks.rows[int64_t(blockIdx.x) * ROWS + warp * QUADS + quad] = found;
        count += found.count();
    }
    const int sum = block_sum<THREADS>(lane == 0 ? count : 0, warps);
    if (threadIdx.x == 0) marks.before[blockIdx.x] = sum;
}

// Counts become sums of those before, by one block: there is one number for 8192 elements.
__global__ void __launch_bounds__(ADDERS) add_up_tiles(Marks marks, int64_t tiles) {
    __shared__ int64_t warps[ADDERS / WARP];
    const int64_t total = add_up<ADDERS>(marks.before, tiles, warps);
    if (threadIdx.x == 0) *marks.total = total;
}

__global__ void __launch_bounds__(THREADS)
    write_marked(const float* x, int64_t n, Marks marks, int64_t* out) {
    __shared__ int warps[WARPS];
    const Tile tile(x, 0, n, blockIdx.x);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Passing* const rows = marks.rows + int64_t(blockIdx.x) * ROWS + warp * QUADS;
    int count = 0;
    for (int quad = 0; quad < QUADS; ++quad) count += rows[quad].count();
    const int of_lower_warps = block_prefix<THREADS>(lane == 0 ? count : 0, warps).before;
    int64_t next = marks.before[blockIdx.x] + __shfl_sync(ALL, of_lower_warps, 0);
    for (int quad = 0; quad < QUADS; ++quad) {
        const Passing found = rows[quad];
        int64_t to = next + found.before(lane);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            if (found.has(lane, i)) out[to++] = tile.begin + place_of(quad) + i;
        next += found.count();
    }
}

}  // namespace

HPCSGD_API int64_t hpcsgd_cuda_above_bytes(int64_t n) {
    const int64_t tiles = tiles_of(n);
    return aligned((1 + tiles) * int64_t(sizeof(int64_t))) + tiles * ROWS * int64_t(sizeof(Passing));
}

HPCSGD_API int32_t hpcsgd_cuda_count_above(int32_t device, cudaStream_t stream, const float* x, int64_t n,
                                           float threshold, void* memory) {
    const OnDevice here(device);
    if (here.error) return here.error;
    const int64_t tiles = tiles_of(n);
    const Marks marks = marks_in(memory, tiles);
    mark<<<unsigned(tiles), THREADS, 0, stream>>>(x, n, threshold_key(threshold), marks);
    add_up_tiles<<<1, ADDERS, 0, stream>>>(marks, tiles);
    return cudaGetLastError();
}

HPCSGD_API int32_t hpcsgd_cuda_write_above(int32_t device, cudaStream_t stream, const float* x, int64_t n,
                                           void* memory, int64_t* out) {
    const OnDevice here(device);
    if (here.error) return here.error;
    const int64_t tiles = tiles_of(n);
    write_marked<<<unsigned(tiles), THREADS, 0, stream>>>(x, n, marks_in(memory, tiles), out);
    return cudaGetLastError();
}
