// The C interface of libhpcsgd_cuda.so. hpcsgd/kernels/cuda.py calls it by ctypes; nothing of Python or torch
// is needed.
//
// Pointers are to the device's memory, sizes and positions int64. Work is put on `stream` and not waited for.
// Functions return a cudaError_t, 0 where all was put there, and leave the caller's device current; `memory`
// has as many bytes as the function ending in _bytes tells.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define HPCSGD_API extern "C" __attribute__((visibility("default")))

enum GradientType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

HPCSGD_API const char* hpcsgd_cuda_error(int32_t error);

// 0 where this library has code that runs on the device with the driver that is there.
HPCSGD_API int32_t hpcsgd_cuda_usable(int32_t device);

// What hpcsgd/kernels/cuda.py has to know as well: elements of a tile, tiles of a group, elements of a
// sample, bytes of a row.
HPCSGD_API void hpcsgd_cuda_layout(int64_t* four);

// acc += g, g = 0, norms[i] = sum of acc² over the segment of row i. Of the rows (struct Segment) only
// `start`, `size` and `first_tile` count; a row may be empty.
HPCSGD_API int64_t hpcsgd_cuda_accumulate_bytes(int64_t tiles);
HPCSGD_API int32_t hpcsgd_cuda_accumulate(int32_t device, cudaStream_t stream, float* acc, void* g,
                                          int32_t type, const void* rows, int64_t segments, int64_t tiles,
                                          void* memory, double* norms);

// out: for each row (struct Segment), ascending, the indices of the k elements of largest magnitude. Ties go
// to the lowest index; NaN > Inf > finite.
HPCSGD_API int64_t hpcsgd_cuda_largest_bytes(int64_t segments, int64_t tiles, int64_t groups,
                                             int64_t candidates);
HPCSGD_API int32_t hpcsgd_cuda_largest(int32_t device, cudaStream_t stream, const float* x, const void* rows,
                                       int64_t segments, int64_t tiles, int64_t groups, int64_t candidates,
                                       void* memory, int64_t* out);

// The positions, as many as a sample has, that `hpcsgd_cuda_largest` looks at first in a segment of n
// elements. For tests, which have to deceive it.
HPCSGD_API void hpcsgd_cuda_sample(int64_t n, int64_t* positions);

// The n > 0 elements of x as numbers of 8 or 4 bits with a float32 for every `block` of them, a multiple of 8, and
// back: the bytes of hpcsgd_pack in csrc/kernels.h. `code` is at an address that a float32 may have.
HPCSGD_API int32_t hpcsgd_cuda_pack(int32_t device, cudaStream_t stream, const float* x, int64_t n, int64_t block,
                                    int32_t bits, int32_t stochastic, uint32_t draw, uint8_t* code);
HPCSGD_API int32_t hpcsgd_cuda_unpack(int32_t device, cudaStream_t stream, const uint8_t* code, int64_t n,
                                      int64_t block, int32_t bits, float* x);

// How many of the n > 0 elements have |x| >= threshold or are NaN, as an int64 at the begin of `memory`. Who
// has read it calls the second function with the same memory: it writes their indices, ascending.
HPCSGD_API int64_t hpcsgd_cuda_above_bytes(int64_t n);
HPCSGD_API int32_t hpcsgd_cuda_count_above(int32_t device, cudaStream_t stream, const float* x, int64_t n,
                                           float threshold, void* memory);
HPCSGD_API int32_t hpcsgd_cuda_write_above(int32_t device, cudaStream_t stream, const float* x, int64_t n,
                                           void* memory, int64_t* out);
