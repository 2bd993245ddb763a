// What csrc/cuda/ takes of CUDA, for a CPU. Streams are done with their work at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

#include "grid.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

using std::max;
using std::min;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorInvalidDevice = 101 };

struct Stream {
    int device;
};
using cudaStream_t = Stream*;

struct cudaFuncAttributes {};

struct alignas(16) float4 {
    float x, y, z, w;
};

constexpr int DEVICES = 4;
extern int current_device;
extern cudaError_t last_error;

inline cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess               ? "no error"
           : error == cudaErrorInvalidDevice ? "invalid device ordinal"
                                             : "invalid configuration";
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
    return cudaSuccess;
}

// `kernel<<<blocks, threads, 0, stream>>>(...)`
template <class Kernel>
void launch(unsigned blocks, unsigned threads, cudaStream_t stream, const Kernel& kernel) {
    if (stream->device != current_device) last_error = cudaErrorInvalidDevice;
    else if (blocks == 0 || blocks > INT32_MAX || threads > 1024) last_error = cudaErrorInvalidConfiguration;
    if (last_error) return;
    grid::launch(blocks, threads, kernel);
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define PLACE(whole_block)                                                         \
    ([]() -> const grid::Place& {                                                  \
        static constexpr grid::Place place{whole_block, __FILE__ ":" TEXT(__LINE__)}; \
        return place;                                                              \
    }())

#define __syncthreads() grid::wait_at(PLACE(true))
#define __threadfence() std::atomic_thread_fence(std::memory_order_seq_cst)

// Warps are whole here: the mask is always that of all lanes.
#define __shfl_xor_sync(mask, value, step) \
    grid::from_lane(value, PLACE(false), [=](int lane) { return lane ^ (step); })
#define __shfl_up_sync(mask, value, step) \
    grid::from_lane(value, PLACE(false), [=](int lane) { return lane < (step) ? lane : lane - (step); })
#define __shfl_sync(mask, value, lane_of) \
    grid::from_lane(value, PLACE(false), [=](int) { return int(lane_of) % grid::LANES; })
#define __ballot_sync(mask, condition) grid::ballot(condition, PLACE(false))

template <class T>
T atomicAdd(T* to, T value) {
    const T before = *to;
    *to += value;
    return before;
}
template <class T>
T atomicExch(T* to, T value) {
    const T before = *to;
    *to = value;
    return before;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint32_t __float_as_uint(float x) { return grid::copied_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return grid::copied_bits<float>(x); }
