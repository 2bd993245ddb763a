// One element at a time: what the inner loops do where a vector would be too long.
#pragma once

#include <cstdint>
#include <cstring>

#include "magnitude.h"

inline float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

struct Float32 {
    using Bits = float;
    static float value(float x) { return x; }
};

struct BFloat16 {
    using Bits = uint16_t;
    static float value(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }
};

struct Float16 {
    using Bits = uint16_t;
    static float value(uint16_t bits) {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
        if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
        // Shifted into place the exponent is 112 too low; the product mends it, subnormal numbers included.
        return from_bits(sign | magnitude << 13) * from_bits((127 + 112) << 23);
    }
};

template <class Element>
inline void add_one(float* acc, typename Element::Bits* g, double* lane) {
    *acc += Element::value(*g);
    *g = 0;
    *lane += double(*acc) * double(*acc);  // the product of two float32 is exact
}

// Bit j tells whether the magnitude of x[j] is above `floor`.
inline uint32_t mask_of(const float* x, int64_t count, int32_t floor) {
    uint32_t mask = 0;
    for (int64_t j = 0; j < count; ++j) mask |= uint32_t(int32_t(magnitude_bits(x[j])) > floor) << j;
    return mask;
}
