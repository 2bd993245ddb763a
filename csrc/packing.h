// Numbers of few bits: the loops over a block, which compilers vectorize. Only exact operations and single
// roundings: the same bits with any instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "instructions.h"
#include "magnitude.h"

#define UNROLLED __attribute__((always_inline)) inline

// What quantizes a block: numbers from -most to most, rounded to the nearest even or, with the dice, up or down.
struct Rounding {
    int32_t most;
    bool stochastic;
    uint32_t draw;
};

// 32 random bits of element `index`: another sequence for every `draw`.
UNROLLED uint32_t dice(uint32_t index, uint32_t draw) {
    uint32_t bits = index * 0x9e3779b1u + draw;
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    return bits ^ bits >> 16;
}

// To the nearest even, of less than 2^22: beyond 2^23 there are no fractions.
UNROLLED float nearest(float value) {
    constexpr float WHOLE = 12582912.0f;
    return (value + WHOLE) - WHOLE;
}

// The whole number that is not above. The difference is exact; its sign, unlike a comparison, is vectorized.
UNROLLED int32_t whole_below(float value) {
    const float whole = nearest(value), above = value - whole;
    int32_t bits;
    std::memcpy(&bits, &above, sizeof bits);
    return int32_t(whole) + (bits >> 31);
}

UNROLLED int32_t largest_bits(const float* x, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, int32_t(magnitude_bits(x[i])));
    return most;
}

UNROLLED int8_t within(int32_t whole, int32_t most) { return int8_t(std::min(std::max(whole, -most), most)); }

UNROLLED void quantize_block(const float* x, int64_t count, float scale, const Rounding& how, uint32_t first,
                             int8_t* q) {
    const int32_t most = how.most;
    if (!how.stochastic) {
        for (int64_t i = 0; i < count; ++i) q[i] = within(int32_t(nearest(x[i] / scale)), most);
        return;
    }
    const uint32_t draw = how.draw;
    float chances[BLOCK];  // a loop of their own, of one width
    for (int32_t i = 0; i < int32_t(count); ++i)
        chances[i] = float(int32_t(dice(first + uint32_t(i), draw) >> 8)) * (1.0f / (1 << 24));
    for (int64_t i = 0; i < count; ++i) q[i] = within(whole_below(x[i] / scale + chances[i]), most);
}

UNROLLED void scale_block(const int8_t* q, int64_t count, float scale, float* x) {
    for (int64_t i = 0; i < count; ++i) x[i] = float(q[i]) * scale;
}

// Of 2 bits: from -2 to 1. No quotient is above the number of elements of a block, so that all are whole numbers of 32
// bits; where they are too large to be rounded exactly they are far beyond the last level.
UNROLLED void quantize_quarters(const float* x, int64_t count, float scale, int8_t* q) {
    for (int64_t i = 0; i < count; ++i)
        q[i] = int8_t(std::min(std::max(int32_t(nearest(x[i] / scale)), -2), 1));
}

// What goes into the scale of 2 bits: the sum of magnitudes, and the bits of the largest number of either sign. Element
// j of the block counts in lane j % LANES, whoever adds: the order of a sum is part of the format.
struct Spread {
    double lanes[LANES] = {};
    int32_t up = 0, down = 0;
};

UNROLLED void add_magnitudes(const float* x, int64_t count, double* lanes) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) lanes[j] += double(std::fabs(x[i + j]));
    for (int64_t j = 0; i + j < count; ++j) lanes[j] += double(std::fabs(x[i + j]));
}

// Numbers above zero compare as their bits do, and those below zero are negative as a whole number.
UNROLLED void find_extremes(const float* x, int64_t count, Spread* of) {
    int32_t up = of->up, down = of->down;
    for (int64_t i = 0; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        up = std::max(up, bits);
        down = std::max(down, bits ^ INT32_MIN);
    }
    of->up = up;
    of->down = down;
}

UNROLLED void add_spread(const float* x, int64_t count, Spread* of) {
    add_magnitudes(x, count, of->lanes);
    find_extremes(x, count, of);
}

// Two numbers of 4 bits a byte, the first in the lower half; an odd one has a zero beside it.
UNROLLED void join_halves(const int8_t* q, int64_t count, uint8_t* code) {
    for (int64_t i = 0; i < count / 2; ++i) code[i] = uint8_t((q[2 * i] & 0xf) | (q[2 * i + 1] & 0xf) << 4);
    if (count % 2) code[count / 2] = uint8_t(q[count - 1] & 0xf);
}

UNROLLED void split_halves(const uint8_t* code, int64_t count, int8_t* q) {
    for (int64_t i = 0; i < count / 2; ++i) {
        q[2 * i] = int8_t(((code[i] & 0xf) ^ 8) - 8);
        q[2 * i + 1] = int8_t((code[i] >> 4 ^ 8) - 8);
    }
    if (count % 2) q[count - 1] = int8_t(((code[count / 2] & 0xf) ^ 8) - 8);
}

// Four of 2 bits, the first in the lowest; what is missing in the last byte is zero. The first is in the lowest byte of
// a word, too.
UNROLLED void join_quarters(const int8_t* q, int64_t count, uint8_t* code) {
    int64_t i = 0;
    for (; i < count / 4; ++i) {
        uint32_t four;
        std::memcpy(&four, q + 4 * i, sizeof four);
        four &= 0x03030303u;
        four |= four >> 6;
        code[i] = uint8_t(four | four >> 12);
    }
    if (count % 4) {
        code[i] = 0;
        for (int64_t j = 0; 4 * i + j < count; ++j) code[i] = uint8_t(code[i] | (q[4 * i + j] & 3) << 2 * j);
    }
}

UNROLLED void split_quarters(const uint8_t* code, int64_t count, int8_t* q) {
    int64_t i = 0;
    for (; i < count / 4; ++i)
        for (int64_t j = 0; j < 4; ++j) q[4 * i + j] = int8_t(((code[i] >> 2 * j & 3) ^ 2) - 2);
    for (int64_t j = 0; 4 * i + j < count; ++j) q[4 * i + j] = int8_t(((code[i] >> 2 * j & 3) ^ 2) - 2);
}
