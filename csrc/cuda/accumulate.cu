// acc += g and g = 0 in one pass that also takes the squared norms of acc's segments.
#include <cuda_fp16.h>

#include "device.cuh"
#include "kernels.cuh"
#include "sums.cuh"

namespace {

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(BFloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
__device__ inline float value_of(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }

template <class Element>
struct alignas(VECTOR * sizeof(Element)) Four {
    Element of[VECTOR];
};

// A thread's vector of a tile, each read whole only where it lies so.
template <class Element>
__device__ inline Four<Element> read(const Element* from, bool whole) {
    if (whole) return *reinterpret_cast<const Four<Element>*>(from);
    return {{from[0], from[1], from[2], from[3]}};
}

template <class Element>
__device__ inline void write(Element* to, bool whole, const Four<Element>& four) {
    if (whole) *reinterpret_cast<Four<Element>*>(to) = four;
    else for (int i = 0; i < VECTOR; ++i) to[i] = four.of[i];
}

__device__ inline double square(float x) { return double(x) * double(x); }  // exact

// All loads come first, so that they do not wait for each other.
template <class Element>
__device__ inline double add_full(float* acc, Element* g, bool whole) {
    Four<float> sums[QUADS];
    Four<Element> added[QUADS];
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        sums[quad] = read(acc + place_of(quad), true);
        added[quad] = read(g + place_of(quad), whole);
    }
    double sum = 0;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            sums[quad].of[i] += value_of(added[quad].of[i]);
            sum += square(sums[quad].of[i]);
        }
        write(acc + place_of(quad), true, sums[quad]);
        write(g + place_of(quad), whole, {});
    }
    return sum;
}

template <class Element>
__device__ inline double add_partial(float* acc, Element* g, const Tile& tile) {
    double sum = 0;
    for (int quad = 0; quad < QUADS; ++quad)
        for (int i = 0; i < VECTOR; ++i) {
            const int place = place_of(quad) + i;
            if (!tile.has(place)) continue;
            acc[place] += value_of(g[place]);
            g[place] = {};
            sum += square(acc[place]);
        }
    return sum;
}

// A block for each tile. acc's vectors lie whole in memory, g's only where g begins at the same place in a
// vector.
template <class Element>
__global__ void __launch_bounds__(THREADS)
    accumulate(float* acc, Element* g, const Segment* table, int rows, double* of_tiles) {
    __shared__ double warps[WARPS];
    const Segment segment = table[row_of(table, rows, blockIdx.x, &Segment::first_tile)];
    const Tile tile(acc, segment.start, segment.size, blockIdx.x - segment.first_tile);
    acc += tile.begin;
    g += tile.begin;
    const bool whole = reinterpret_cast<uintptr_t>(g) % sizeof(Four<Element>) == 0;
    const double sum = tile.full() ? add_full(acc, g, whole) : add_partial(acc, g, tile);
    const double total = block_sum<THREADS>(sum, warps);
    if (threadIdx.x == 0) of_tiles[blockIdx.x] = total;
}

// A block for each segment.
__global__ void __launch_bounds__(THREADS)
    add_tiles(const Segment* table, const double* of_tiles, double* norms) {
    __shared__ double warps[WARPS];
    const Segment segment = table[blockIdx.x];
    const int64_t tiles = tiles_of(segment.size);
    of_tiles += segment.first_tile;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < tiles; i += THREADS) sum += of_tiles[i];
    const double total = block_sum<THREADS>(sum, warps);
    if (threadIdx.x == 0) norms[blockIdx.x] = total;
}

}  // namespace

HPCSGD_API const char* hpcsgd_cuda_error(int32_t error) { return cudaGetErrorString(cudaError_t(error)); }

HPCSGD_API int64_t hpcsgd_cuda_accumulate_bytes(int64_t tiles) { return tiles * int64_t(sizeof(double)); }

HPCSGD_API int32_t hpcsgd_cuda_accumulate(int32_t device, cudaStream_t stream, float* acc, void* g,
                                          int32_t type, const void* rows, int64_t segments, int64_t tiles,
                                          void* memory, double* norms) {
    const OnDevice here(device);
    if (here.error) return here.error;
    const Segment* const table = static_cast<const Segment*>(rows);
    double* const sums = static_cast<double*>(memory);
    const int count = int(segments);
    const unsigned blocks = unsigned(tiles);
    if (type == FLOAT32)
        accumulate<<<blocks, THREADS, 0, stream>>>(acc, static_cast<float*>(g), table, count, sums);
    else if (type == BFLOAT16)
        accumulate<<<blocks, THREADS, 0, stream>>>(acc, static_cast<BFloat16*>(g), table, count, sums);
    else
        accumulate<<<blocks, THREADS, 0, stream>>>(acc, static_cast<Float16*>(g), table, count, sums);
    add_tiles<<<unsigned(count), THREADS, 0, stream>>>(table, sums, norms);
    return cudaGetLastError();
}
