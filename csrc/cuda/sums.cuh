// Sums over a warp and over a block, always in the same order.
#pragma once

#include "tiles.cuh"

template <class Number>
__device__ inline Number warp_sum(Number value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    return value;
}

// What the lanes up to and including this one have.
template <class Number>
__device__ inline Number warp_prefix(Number value) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const Number lower = __shfl_up_sync(ALL, value, step);
        if (lane >= step) value += lower;
    }
    return value;
}

// What the threads before this one have, and all have. `warps` is shared memory for one number a warp; every
// thread of the block has to call, and may use `warps` again when it returns.
template <class Number>
struct Prefix {
    Number before, total;
};

template <int N, class Number>
__device__ inline Prefix<Number> block_prefix(Number value, Number* warps) {
    static_assert(N % WARP == 0 && N / WARP <= WARP);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Number upto = warp_prefix(value);
    if (lane == WARP - 1) warps[warp] = upto;
    __syncthreads();
    const Number sum = lane < N / WARP ? warps[lane] : Number(0);
    const Number sums = warp_prefix(sum);
    const Number lower = __shfl_sync(ALL, sums - sum, warp);
    const Number total = __shfl_sync(ALL, sums, WARP - 1);
    __syncthreads();
    return {lower + upto - value, total};
}

// Each of `count` numbers becomes the sum of those before it; returns that of all. One block calls, of N threads.
template <int N, class Number>
__device__ inline Number add_up(Number* numbers, int64_t count, Number* warps) {
    Number sum = 0;
    for (int64_t begin = 0; begin < count; begin += N) {
        const int64_t i = begin + threadIdx.x;
        const Prefix<Number> prefix = block_prefix<N>(i < count ? numbers[i] : Number(0), warps);
        if (i < count) numbers[i] = sum + prefix.before;
        sum += prefix.total;
    }
    return sum;
}

template <int N, class Number>
__device__ inline Number block_sum(Number value, Number* warps) {
    return block_prefix<N>(value, warps).total;
}
