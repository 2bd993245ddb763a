// The C interface of libhpcsgd_cpu.so, which hpcsgd/kernels/native.py calls by ctypes; it knows no Python
// and no torch.
//
// Sizes and positions are int64. `threads` is the most threads a call may use; results do not depend on it.
// With `portable` = 1 no vector instructions beyond the compiler's default are used; results are the same.
// Functions return 0 or a count; a negative number is one of the errors below, and outputs are then
// undefined.
#pragma once

#include <cstdint>

#define HPCSGD_API extern "C" __attribute__((visibility("default")))

enum Error : int64_t { OUT_OF_MEMORY = -1, NOT_ASCENDING = -2, MALFORMED = -3, NO_SEGMENTS = -4 };

enum GradientType : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// The name of the instructions that a call with portable = 0 uses on this CPU.
HPCSGD_API const char* hpcsgd_instructions();

// acc += g, g = 0, norms[i] = sum of acc² over [starts[i], starts[i + 1]) for 0 <= i < segments.
HPCSGD_API int64_t hpcsgd_accumulate(float* acc, void* g, int32_t type, const int64_t* starts,
                                     int64_t segments, double* norms, int32_t threads, int32_t portable);

// How many indices `hpcsgd_largest` will write: the sum of k; NO_SEGMENTS unless 0 <= starts[i] <= stops[i] <=
// starts[i + 1], the last stop <= n, and 0 <= k[i] <= stops[i] - starts[i].
HPCSGD_API int64_t hpcsgd_wanted(const int64_t* starts, const int64_t* stops, const int64_t* k, int64_t segments,
                                 int64_t n);

// out: ascending, the indices of the k[i] elements of largest magnitude in [starts[i], stops[i]), for all
// segments. Ties go to the lowest index; NaN > Inf > finite.
HPCSGD_API int64_t hpcsgd_largest(const float* x, const int64_t* starts, const int64_t* stops,
                                  const int64_t* k, int64_t segments, int64_t* out, int32_t threads,
                                  int32_t portable);

// The positions, at most n / 4, that `hpcsgd_largest` looks at first in a segment of n; returns how many.
// For tests, which have to deceive it.
HPCSGD_API int64_t hpcsgd_sample(int64_t n, int64_t k, int64_t* positions);

// Returns how many of the n elements have |x| >= threshold or are NaN; writes their indices, ascending, to
// out where they are at most `room`.
HPCSGD_API int64_t hpcsgd_above(const float* x, int64_t n, float threshold, int64_t* out, int64_t room,
                                int32_t threads, int32_t portable);

// DEFT's algorithms 3 and 4: k[i] of layer [bounds[i], bounds[i + 1]), `total` in all and at least `floor` each, and
// the bin, 0 … workers - 1, that it goes into.
HPCSGD_API int64_t hpcsgd_share_out(const double* squared_norms, const int64_t* bounds, int64_t layers, int64_t total,
                                    int64_t floor, int64_t workers, int64_t* k, int32_t* bins);

// The bytes that `hpcsgd_encode` will write; NOT_ASCENDING unless 0 <= indices[0] < indices[1] < …
HPCSGD_API int64_t hpcsgd_encoded_bytes(const int64_t* indices, int64_t count);

// Each index as its distance from the one before, less one, in groups of 7 bits from the low end on; the top
// bit of a byte tells that another follows. Returns the bytes written.
HPCSGD_API int64_t hpcsgd_encode(const int64_t* indices, int64_t count, uint8_t* code);

// The inverse; MALFORMED where `code` does not hold exactly `count` indices below 2^63.
HPCSGD_API int64_t hpcsgd_decode(const uint8_t* code, int64_t bytes, int64_t count, int64_t* indices);

// Which k[s] of the elements [starts[s], stops[s]) were chosen, segment by segment: ascending indices, all of
// them in `indices`, as Elias-Fano's code or one bit an element, whichever is shorter. `bytes` is what n and k of
// all segments come to, or else NO_SEGMENTS is returned; NOT_ASCENDING for other indices.
HPCSGD_API int64_t hpcsgd_encode_chosen(const int64_t* indices, const int64_t* starts, const int64_t* stops,
                                        const int64_t* k, int64_t segments, uint8_t* code, int64_t bytes);

// The inverse; MALFORMED where `code` holds other than so many indices of each segment.
HPCSGD_API int64_t hpcsgd_decode_chosen(const uint8_t* code, int64_t bytes, const int64_t* starts,
                                        const int64_t* stops, const int64_t* k, int64_t segments,
                                        int64_t* indices);

// x as numbers of 8, 4 or 2 bits in blocks of `block` elements, a multiple of 8: a float32 for each block, then the
// numbers, of 4 bits two a byte, of 2 four. Rounded to the nearest even, or (not of 2 bits) up and down by chance, the
// dice being thrown by `draw`. Blocks with a NaN or an infinity become NaNs.
HPCSGD_API int64_t hpcsgd_pack(const float* x, int64_t n, int64_t block, int32_t bits, int32_t stochastic,
                               uint32_t draw, uint8_t* code, int32_t threads, int32_t portable);

// The inverse, but for the rounding.
HPCSGD_API int64_t hpcsgd_unpack(const uint8_t* code, int64_t n, int64_t block, int32_t bits, float* x,
                                 int32_t threads, int32_t portable);
