// A radix select: the digits of the k-th largest key one after the other, from counts of each digit.
#pragma once

#include "sums.cuh"

constexpr int BINS = 1 << 11;

// Keys have 31 bits: digits of 11, 10 and 10.
struct Digit {
    int shift;   // the digit's lowest bit
    int higher;  // the lowest bit of the digits before

    __device__ bool counts(uint32_t key, uint32_t prefix) const { return (key ^ prefix) >> higher == 0; }
    __device__ uint32_t of(uint32_t key) const { return key >> shift & ((1u << (higher - shift)) - 1); }
};

constexpr int DIGITS = 3;

__host__ __device__ inline Digit digit_number(int i) {
    return i == 0 ? Digit{20, 31} : i == 1 ? Digit{10, 20} : Digit{0, 10};
}

// The key looked for as far as it is known, and which one it is, from 1 on, of those that begin alike, from
// the top.
struct Sought {
    uint32_t prefix;
    unsigned long long rank;
};

// The next digit: the bin in which the rank-th largest lies. All N threads call and get the same answer.
template <int N, class Count>
__device__ inline Sought next_digit(const Count* bins, Sought sought, Digit digit) {
    constexpr int EACH = BINS / N;
    __shared__ unsigned long long warps[N / WARP];
    __shared__ Sought found;
    const int top = BINS - 1 - int(threadIdx.x) * EACH;
    Count count[EACH];
    unsigned long long sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += count[i] = bins[top - i];
    unsigned long long above = block_prefix<N>(sum, warps).before;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (above < sought.rank && sought.rank <= above + count[i])
            found = {sought.prefix | uint32_t(top - i) << digit.shift, sought.rank - above};
        above += count[i];
    }
    __syncthreads();
    return found;
}
