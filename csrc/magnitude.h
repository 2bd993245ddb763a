// Magnitudes as integers: the bits of |x| are ordered as |x| is, with NaNs above infinity.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

constexpr uint32_t NO_SIGN = 0x7fffffff;
constexpr uint32_t NAN_KEY = 0x7f800001;  // one key for all NaNs, just above infinity's

inline uint32_t magnitude_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits & NO_SIGN;
}

inline uint32_t key(float x) { return std::min(magnitude_bits(x), NAN_KEY); }

// "At most this key" for comparisons with magnitude_bits, which tell NaNs apart.
inline int32_t floor_of(uint32_t key) { return int32_t(key >= NAN_KEY ? NO_SIGN : key); }
constexpr int32_t NO_FLOOR = -1;
