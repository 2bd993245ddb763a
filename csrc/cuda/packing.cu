// Vectors as numbers of 8 or 4 bits in blocks, to the bit as csrc/packing.cpp makes them: first the scales of all
// blocks, then the numbers. Threads that pack have eight elements at a time, which never are of two blocks; a team of lanes has a whole block.
#include <cmath>

#include "device.cuh"
#include "kernels.cuh"
#include "tiles.cuh"

namespace {

constexpr int EIGHT = 8;
constexpr int VECTORS = 4;  // that a thread unpacks
constexpr uint32_t INFINITE = 0x7f800000, NO_NUMBER = 0x7fc00000;

struct Layout {
    int64_t n, block;
    int bits;

    __host__ __device__ int64_t blocks() const { return (n + block - 1) / block; }
    __device__ int64_t place(int64_t element) const { return 4 * blocks() + element * bits / 8; }
    __device__ bool whole(int64_t at) const { return at + EIGHT <= n; }
    __device__ int most() const { return bits == 8 ? 127 : 7; }
};

struct Rounding {
    bool stochastic;
    uint32_t draw;
};

struct Elements {
    float of[EIGHT];
};

// Behind the last one there are zeros.
__device__ inline Elements read(const float* x, int64_t at, const Layout& layout) {
    if (layout.whole(at) && reinterpret_cast<uintptr_t>(x + at) % sizeof(float4) == 0) {
        const float4* const fours = reinterpret_cast<const float4*>(x + at);
        const float4 a = fours[0], b = fours[1];
        return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    }
    Elements found;
#pragma unroll
    for (int i = 0; i < EIGHT; ++i) found.of[i] = at + i < layout.n ? x[at + i] : 0.0f;
    return found;
}

// From 0 on and below 1, of 24 random bits: another sequence for every `draw`.
__device__ inline float chance(uint32_t index, uint32_t draw) {
    uint32_t bits = index * 0x9e3779b1u + draw;
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    return float((bits ^ bits >> 16) >> 8) * (1.0f / (1 << 24));
}

__device__ inline int quantized(float value, int64_t index, const Rounding& how, int most) {
    const float whole = how.stochastic ? floorf(value + chance(uint32_t(index), how.draw)) : rintf(value);
    return min(max(int(whole), -most), most);
}

// Of as many bytes as `bits`: numbers of 8 or 4 bits, the first in the lowest.
__device__ inline void write(const int (&q)[EIGHT], int64_t at, const Layout& layout, uint8_t* code) {
    const int each = 32 / layout.bits;
    const uint32_t mask = layout.bits == 8 ? 0xff : 0xf;
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < EIGHT; ++i) words[i / each] |= (uint32_t(q[i]) & mask) << i % each * layout.bits;
    uint8_t* const to = code + layout.place(at);
    if (layout.whole(at)) {
        uint32_t* const there = reinterpret_cast<uint32_t*>(to);
        there[0] = words[0];
        if (each < EIGHT) there[1] = words[1];
        return;
    }
    const int bytes = int((layout.n - at) * layout.bits + 7) / 8;
    for (int i = 0; i < bytes; ++i) to[i] = uint8_t(words[i / 4] >> i % 4 * 8);
}

__global__ void __launch_bounds__(THREADS)
    pack(const float* x, Layout layout, Rounding how, int team, uint8_t* code) {
    const int64_t number = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / team;
    const int lane = threadIdx.x % team, step = team * EIGHT, limit = layout.most();
    const int64_t begin = number * layout.block, first = begin + lane * EIGHT;
    const int64_t end = min(begin + layout.block, layout.n);  // there may be teams without a block
    uint32_t largest = 0;
    for (int64_t at = first; at < end; at += step) {
        const Elements mine = read(x, at, layout);
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) largest = max(largest, __float_as_uint(mine.of[i]) & 0x7fffffffu);
    }
    for (int apart = team / 2; apart > 0; apart /= 2)
        largest = max(largest, __shfl_xor_sync(ALL, largest, apart));
    const float scale = __uint_as_float(largest < INFINITE ? largest : NO_NUMBER) / float(limit);
    if (lane == 0 && begin < layout.n)
        reinterpret_cast<uint32_t*>(code)[number] = largest < INFINITE ? __float_as_uint(scale) : NO_NUMBER;
    for (int64_t at = first; at < end; at += step) {
        const Elements mine = read(x, at, layout);
        int q[EIGHT];
#pragma unroll
        for (int i = 0; i < EIGHT; ++i)
            q[i] = scale > 0 ? quantized(mine.of[i] / scale, at + i, how, limit) : 0;
        write(q, at, layout, code);
    }
}

// The bits of the VECTOR numbers from `at` on, the first in the lowest. Behind the last one there are zeros; `at`
// may lie there, too.
__device__ inline uint32_t read(const uint8_t* code, int64_t at, const Layout& layout) {
    const uint8_t* const from = code + layout.place(at);
    if (at + VECTOR <= layout.n)
        return layout.bits == 8 ? *reinterpret_cast<const uint32_t*>(from)
                                : *reinterpret_cast<const uint16_t*>(from);
    const int bytes = (int(layout.n - at) * layout.bits + 7) / 8;
    uint32_t found = 0;
    for (int i = 0; i < bytes; ++i) found |= uint32_t(from[i]) << i * 8;
    return found;
}

__device__ inline float number(uint32_t bits_of_four, int i, int bits, float scale) {
    const int above = 32 - bits * (i + 1);
    const int number = int(bits_of_four << above) >> (32 - bits);
    return scale != scale ? scale : float(number) * scale;  // all NaNs have the bits of the scale's
}

// Nothing behind the last element.
__device__ inline void write(const float4& four, int64_t at, int64_t n, float* x) {
    if (at + VECTOR <= n && reinterpret_cast<uintptr_t>(x + at) % sizeof(float4) == 0) {
        *reinterpret_cast<float4*>(x + at) = four;
        return;
    }
    const float each[VECTOR] = {four.x, four.y, four.z, four.w};
    for (int i = 0; i < VECTOR && at + i < n; ++i) x[at + i] = each[i];
}

// A thread has a few vectors, those of a warp side by side. All are read before the first is written, so that
// several loads are under way.
__global__ void __launch_bounds__(THREADS)
    unpack(const uint8_t* __restrict__ code, Layout layout, float* __restrict__ x) {
    const float* const scales = reinterpret_cast<const float*>(code);
    const int64_t first = (int64_t(blockIdx.x) * VECTORS * THREADS + threadIdx.x) * VECTOR;
    uint32_t found[VECTORS];
    float scale[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int64_t at = first + v * THREADS * VECTOR;
        found[v] = read(code, at, layout);
        scale[v] = scales[min(at, layout.n - 1) / layout.block];
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const auto of = [&](int i) { return number(found[v], i, layout.bits, scale[v]); };
        write(float4{of(0), of(1), of(2), of(3)}, first + v * THREADS * VECTOR, layout.n, x);
    }
}

// Lanes that a block is worth.
int team_of(int64_t block) {
    int team = 1;
    while (team < WARP && team * EIGHT < block) team *= 2;
    return team;
}

// Of threads, each of which does `each` of the `count` things that there are.
unsigned blocks_for(int64_t count, int64_t each = 1) {
    return unsigned((count + each * THREADS - 1) / (each * THREADS));
}

}  // namespace

HPCSGD_API int32_t hpcsgd_cuda_pack(int32_t device, cudaStream_t stream, const float* x, int64_t n, int64_t block,
                                    int32_t bits, int32_t stochastic, uint32_t draw, uint8_t* code) {
    const OnDevice here(device);
    if (here.error) return here.error;
    const Layout layout{n, block, bits};
    const Rounding how{stochastic != 0, draw};
    const int team = team_of(block);
    pack<<<blocks_for(layout.blocks() * team), THREADS, 0, stream>>>(x, layout, how, team, code);
    return cudaGetLastError();
}

HPCSGD_API int32_t hpcsgd_cuda_unpack(int32_t device, cudaStream_t stream, const uint8_t* code, int64_t n,
                                      int64_t block, int32_t bits, float* x) {
    const OnDevice here(device);
    if (here.error) return here.error;
    const Layout layout{n, block, bits};
    unpack<<<blocks_for((n + VECTOR - 1) / VECTOR, VECTORS), THREADS, 0, stream>>>(code, layout, x);
    return cudaGetLastError();
}
