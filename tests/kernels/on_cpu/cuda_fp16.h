#pragma once

#include <cstdint>

struct __half {
    uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half half) {
    _Float16 value;
    __builtin_memcpy(&value, &half, sizeof value);
    return float(value);
}
