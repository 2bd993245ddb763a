// Which k of n elements were chosen, in bytes whose number n and k decide: Elias-Fano's code, or one bit an
// element where that is shorter. hpcsgd/kernels/chosen.py says it in numpy.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace {

// The code of one segment of n elements.
struct Form {
    int64_t n, k;
    int64_t low;    // bits of an index that are written as they are
    int64_t upper;  // where the rest begins, a one for every index
    int64_t bits;
    bool map;  // one bit an element

    Form(int64_t n, int64_t k) : n(n), k(k), low(0), upper(0), bits(0), map(false) {
        if (k == 0 || k == n) return;
        low = 63 - __builtin_clzll(uint64_t(n / k));
        upper = k * low;
        bits = upper + k + ((n - 1) >> low);
        if ((map = bits >= n)) bits = n;
    }
    int64_t bytes() const { return (bits + 7) / 8; }
};

bool are_segments(const int64_t* starts, const int64_t* stops, const int64_t* k, int64_t segments, int64_t bytes) {
    for (int64_t s = 0; s < segments; ++s) {
        if (starts[s] > stops[s] || k[s] < 0 || k[s] > stops[s] - starts[s]) return false;
        bytes -= Form(stops[s] - starts[s], k[s]).bytes();
    }
    return bytes == 0;
}

void set(uint8_t* code, int64_t bit) { code[bit >> 3] |= uint8_t(1u << (bit & 7)); }

void put(uint8_t* code, int64_t bit, uint64_t value, int64_t count) {
    for (int64_t done = 0; done < count;) {
        const int64_t at = bit + done, part = std::min<int64_t>(8 - (at & 7), count - done);
        code[at >> 3] |= uint8_t(((value >> done) & ((1u << part) - 1)) << (at & 7));
        done += part;
    }
}

// Bits from `bit` on, 57 of them at least, with zeros after the end of the code.
uint64_t bits_from(const uint8_t* code, int64_t bytes, int64_t bit) {
    uint64_t word = 0;
    const int64_t first = bit >> 3;
    if (first + 8 <= bytes)
        std::memcpy(&word, code + first, 8);
    else if (first < bytes)
        std::memcpy(&word, code + first, size_t(bytes - first));
    return word >> (bit & 7);
}

// The first one at `bit` or after it; `end` where there is none before that.
int64_t next_one(const uint8_t* code, int64_t bytes, int64_t bit, int64_t end) {
    constexpr int64_t SURE = 57;
    while (bit < end) {
        const uint64_t word = bits_from(code, bytes, bit) & ((uint64_t(1) << SURE) - 1);
        if (word) return std::min(end, bit + __builtin_ctzll(word));
        bit += SURE;
    }
    return end;
}

bool decode(const uint8_t* code, const Form& form, int64_t start, int64_t* indices) {
    const int64_t bytes = form.bytes(), end = 8 * bytes;
    const uint64_t mask = (uint64_t(1) << form.low) - 1;
    int64_t bit = form.map ? 0 : form.upper, last = -1;
    for (int64_t i = 0; i < form.k; ++i, ++bit) {
        if ((bit = next_one(code, bytes, bit, end)) == end) return false;
        const int64_t low = form.map ? 0 : int64_t(bits_from(code, bytes, i * form.low) & mask);
        const int64_t index = form.map ? bit : (bit - form.upper - i) << form.low | low;
        if (index <= last || index >= form.n) return false;
        indices[i] = start + (last = index);
    }
    return next_one(code, bytes, bit, end) == end;
}

}  // namespace

HPCSGD_API int64_t hpcsgd_encode_chosen(const int64_t* indices, const int64_t* starts, const int64_t* stops,
                                        const int64_t* k, int64_t segments, uint8_t* code, int64_t bytes) {
    if (!are_segments(starts, stops, k, segments, bytes)) return NO_SEGMENTS;
    std::memset(code, 0, size_t(bytes));
    for (int64_t s = 0; s < segments; ++s) {
        const Form form(stops[s] - starts[s], k[s]);
        int64_t last = -1;
        for (int64_t i = 0; i < k[s]; ++i) {
            const int64_t index = indices[i] - starts[s];
            if (index <= last || index >= form.n) return NOT_ASCENDING;
            last = index;
            if (form.map) set(code, index);
            if (form.map || form.bits == 0) continue;
            put(code, i * form.low, uint64_t(index) & ((uint64_t(1) << form.low) - 1), form.low);
            set(code, form.upper + (index >> form.low) + i);
        }
        indices += k[s];
        code += form.bytes();
    }
    return 0;
}

HPCSGD_API int64_t hpcsgd_decode_chosen(const uint8_t* code, int64_t bytes, const int64_t* starts,
                                        const int64_t* stops, const int64_t* k, int64_t segments,
                                        int64_t* indices) {
    if (!are_segments(starts, stops, k, segments, bytes)) return NO_SEGMENTS;
    for (int64_t s = 0; s < segments; ++s) {
        const Form form(stops[s] - starts[s], k[s]);
        if (k[s] == form.n)
            for (int64_t i = 0; i < k[s]; ++i) indices[i] = starts[s] + i;
        else if (!decode(code, form, starts[s], indices))
            return MALFORMED;
        indices += k[s];
        code += form.bytes();
    }
    return 0;
}
