// The inner loops with AVX2, FMA and F16C intrinsics. Functions name their target: the file needs no flags.
#include "instructions.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "elements.h"
#include "packing.h"

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 __attribute__((always_inline)) inline

namespace {

// Elements that are asked for while those before them are looked at: reading must go on while the caller
// deals with what passes. Two cache lines hold one word. Beyond the end of x it does nothing.
constexpr int64_t AHEAD = 2048;

INLINE __m256i above(const float* x, __m256i floor) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm256_cmpgt_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(NO_SIGN)), floor);
}

INLINE uint32_t mask_of_word(const float* x, __m256i floor) {
    const __m256i first = _mm256_packs_epi32(above(x, floor), above(x + 8, floor));
    const __m256i second = _mm256_packs_epi32(above(x + 16, floor), above(x + 24, floor));
    // Packing goes by halves of vectors: the permutation puts groups of four elements back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    return uint32_t(_mm256_movemask_epi8(bytes));
}

AVX2 int64_t passing(const float* x, int64_t count, int32_t floor, Hit* hits) {
    const __m256i floors = _mm256_set1_epi32(floor);
    int64_t found = 0, i = 0;
    for (; i + WORD <= count; i += WORD) {  // without a branch: one in a few words passes, unpredictably
        hits[found] = {uint32_t(i / WORD), mask_of_word(x + i, floors)};
        _mm_prefetch(reinterpret_cast<const char*>(x + i + AHEAD), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(x + i + AHEAD + WORD / 2), _MM_HINT_T0);
        found += hits[found].mask != 0;
    }
    hits[found] = {uint32_t(i / WORD), mask_of(x + i, count - i, floor)};
    return found + (hits[found].mask != 0);
}

template <class Element>
struct Vector;

template <>
struct Vector<Float32> {
    INLINE static __m256 take(float* g) {
        const __m256 values = _mm256_loadu_ps(g);
        _mm256_storeu_ps(g, _mm256_setzero_ps());
        return values;
    }
};

INLINE __m128i take_bits(uint16_t* g) {
    const auto where = reinterpret_cast<__m128i*>(g);
    const __m128i bits = _mm_loadu_si128(where);
    _mm_storeu_si128(where, _mm_setzero_si128());
    return bits;
}

template <>
struct Vector<BFloat16> {
    INLINE static __m256 take(uint16_t* g) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(take_bits(g)), 16));
    }
};

template <>
struct Vector<Float16> {
    INLINE static __m256 take(uint16_t* g) { return _mm256_cvtph_ps(take_bits(g)); }
};

template <class Element>
AVX2 double add(float* acc, typename Element::Bits* g, int64_t count) {
    __m256d low = _mm256_setzero_pd(), high = low;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(acc + i), Vector<Element>::take(g + i));
        _mm256_storeu_ps(acc + i, sum);
        const __m256d first = _mm256_cvtps_pd(_mm256_castps256_ps128(sum));
        const __m256d second = _mm256_cvtps_pd(_mm256_extractf128_ps(sum, 1));
        low = _mm256_fmadd_pd(first, first, low);  // the products are exact: no other bits than without FMA
        high = _mm256_fmadd_pd(second, second, high);
    }
    double lanes[LANES];
    _mm256_storeu_pd(lanes, low);
    _mm256_storeu_pd(lanes + 4, high);
    for (; i < count; ++i) add_one<Element>(acc + i, g + i, lanes + i % LANES);
    return total(lanes);
}

// Those that the compiler vectorizes by itself, once it may.
AVX2 int32_t largest(const float* x, int64_t count) { return largest_bits(x, count); }
AVX2 void quantize(const float* x, int64_t count, float scale, const Rounding& how, uint32_t first, int8_t* q) {
    quantize_block(x, count, scale, how, first, q);
}
AVX2 void scaled(const int8_t* q, int64_t count, float scale, float* x) { scale_block(q, count, scale, x); }
AVX2 void join(const int8_t* q, int64_t count, uint8_t* code) { join_halves(q, count, code); }
AVX2 void split(const uint8_t* code, int64_t count, int8_t* q) { split_halves(code, count, q); }
AVX2 void spread(const float* x, int64_t count, Spread* of) {
    __m256d low = _mm256_loadu_pd(of->lanes), high = _mm256_loadu_pd(of->lanes + 4);
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(NO_SIGN));
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const __m256 size = _mm256_and_ps(_mm256_loadu_ps(x + i), no_sign);
        low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(size)));
        high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(size, 1)));
    }
    _mm256_storeu_pd(of->lanes, low);
    _mm256_storeu_pd(of->lanes + 4, high);
    add_magnitudes(x + i, count - i, of->lanes);
    find_extremes(x, count, of);
}
AVX2 void quantize_by_four(const float* x, int64_t count, float scale, int8_t* q) {
    quantize_quarters(x, count, scale, q);
}
AVX2 void join_four(const int8_t* q, int64_t count, uint8_t* code) { join_quarters(q, count, code); }
AVX2 void split_four(const uint8_t* code, int64_t count, int8_t* q) { split_quarters(code, count, q); }

constexpr Instructions WITH_AVX2 = {"avx2",  passing,  add<Float32>,     add<BFloat16>, add<Float16>,
                                    largest, quantize, scaled,           join,          split,
                                    spread,  quantize_by_four, join_four, split_four};

}  // namespace

const Instructions* avx2_instructions() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) return nullptr;
    return __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? &WITH_AVX2 : nullptr;
}

#else

const Instructions* avx2_instructions() { return nullptr; }

#endif
