// The inner loops, of which there is one set for every kind of CPU. All sets give the same bits.
#pragma once

#include <cstdint>

struct Rounding;
struct Spread;

constexpr int64_t WORD = 32;     // elements that share one mask
constexpr int64_t BLOCK = 512;   // elements at most for one call of `passing`, so that they stay in L1
constexpr int64_t LANES = 8;     // partial sums of `add_*`: element j of a call counts in j % LANES

// Bit j of `mask` is element WORD * word + j.
struct Hit {
    uint32_t word, mask;
};

struct Instructions {
    const char* name;

    // Writes the words of x[0 : count], count <= BLOCK, with a magnitude above `floor`; returns how many.
    // `hits` has room for BLOCK / WORD + 1.
    int64_t (*passing)(const float* x, int64_t count, int32_t floor, Hit* hits);

    // acc += g, g = 0; returns the sum of acc².
    double (*add_float32)(float* acc, float* g, int64_t count);
    double (*add_bfloat16)(float* acc, uint16_t* g, int64_t count);
    double (*add_float16)(float* acc, uint16_t* g, int64_t count);

    // The largest magnitude, as bits: those of NaNs are above all.
    int32_t (*largest_bits)(const float* x, int64_t count);

    // q = x / scale as whole numbers; `first` is the index of x[0] among all. x = q · scale.
    void (*quantize)(const float* x, int64_t count, float scale, const Rounding& how, uint32_t first, int8_t* q);
    void (*scale)(const int8_t* q, int64_t count, float scale, float* x);

    // Numbers of 4 bits, two a byte.
    void (*join_halves)(const int8_t* q, int64_t count, uint8_t* code);
    void (*split_halves)(const uint8_t* code, int64_t count, int8_t* q);

    // Of 2 bits, four a byte; `spread` goes on with what it has of earlier elements of the block.
    void (*spread)(const float* x, int64_t count, Spread* of);
    void (*quantize_quarters)(const float* x, int64_t count, float scale, int8_t* q);
    void (*join_quarters)(const int8_t* q, int64_t count, uint8_t* code);
    void (*split_quarters)(const uint8_t* code, int64_t count, int8_t* q);
};

const Instructions& best_instructions();      // those of this CPU
const Instructions& portable_instructions();  // of any CPU
const Instructions* avx2_instructions();      // null where this CPU has none

inline const Instructions& instructions(bool portable) {
    return portable ? portable_instructions() : best_instructions();
}

// The lanes of a sum of squares, always added up in this order.
inline double total(const double* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}
