// Ascending indices as variable-length integers.
#include "kernels.h"

namespace {

constexpr int SHIFT = 7;
constexpr uint8_t MORE = 0x80;

// 7-bit groups of a gap; none is longer than 63 bits.
int64_t groups(uint64_t gap) { return (63 - __builtin_clzll(gap | 1)) / SHIFT + 1; }

}  // namespace

HPCSGD_API int64_t hpcsgd_encoded_bytes(const int64_t* indices, int64_t count) {
    int64_t bytes = 0, last = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (indices[i] <= last) return NOT_ASCENDING;
        bytes += groups(uint64_t(indices[i] - last - 1));
        last = indices[i];
    }
    return bytes;
}

HPCSGD_API int64_t hpcsgd_encode(const int64_t* indices, int64_t count, uint8_t* code) {
    uint8_t* out = code;
    int64_t last = -1;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t gap = uint64_t(indices[i] - last - 1);
        for (; gap >= MORE; gap >>= SHIFT) *out++ = uint8_t(gap) | MORE;
        *out++ = uint8_t(gap);
        last = indices[i];
    }
    return out - code;
}

HPCSGD_API int64_t hpcsgd_decode(const uint8_t* code, int64_t bytes, int64_t count, int64_t* indices) {
    const uint8_t* const end = code + bytes;
    uint64_t next = 0;  // the least that the index may be
    for (int64_t i = 0; i < count; ++i) {
        uint64_t gap = 0;
        int shift = 0;
        for (;; shift += SHIFT) {
            if (code == end || shift == 63) return MALFORMED;
            gap |= uint64_t(*code & (MORE - 1)) << shift;
            if (!(*code++ & MORE)) break;
        }
        next += gap;  // both are below 2^63 and at most that: their sum does not overflow
        if (next > INT64_MAX) return MALFORMED;
        indices[i] = int64_t(next++);
    }
    if (code != end) return MALFORMED;
    return 0;
}
