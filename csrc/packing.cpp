// Vectors as numbers of 8, 4 or 2 bits in blocks: first a float32 for every block, its scale, then the numbers. The
// scale is the largest magnitude over the largest number; of 2 bits a multiple of the mean magnitude, negative
// where the largest number is positive, since there is a -2 and no 2. A block with a NaN or an infinity is one of
// NaNs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "elements.h"
#include "instructions.h"
#include "kernels.h"
#include "packing.h"
#include "workers.h"

namespace {

constexpr int64_t SHARE = 1 << 18;  // elements that are worth a thread

struct Layout {
    int64_t n, block, bits;
    int64_t blocks() const { return (n + block - 1) / block; }
    int64_t begin(int64_t i) const { return i * block; }
    int64_t count(int64_t i) const { return std::min(block, n - begin(i)); }
    int64_t numbers(int64_t i) const { return 4 * blocks() + begin(i) * bits / 8; }
};

float scale_of(int32_t largest, int32_t most) {
    const float magnitude = from_bits(uint32_t(largest));
    return std::isfinite(magnitude) ? magnitude / float(most) : std::numeric_limits<float>::quiet_NaN();
}

constexpr double OF_THE_MEAN = 1.4;
constexpr double LARGEST_SCALE = double(std::numeric_limits<float>::max()) / 2;  // of which two are finite

float scale_of_quarters(const float* x, int64_t count, const Instructions& with) {
    Spread of;
    for (int64_t begin = 0; begin < count; begin += BLOCK)
        with.spread(x + begin, std::min(BLOCK, count - begin), &of);
    const double wanted = OF_THE_MEAN * total(of.lanes) / double(count);
    if (!std::isfinite(wanted)) return std::numeric_limits<float>::quiet_NaN();
    const float size = float(std::min(wanted, LARGEST_SCALE));
    return of.up >= of.down ? -size : size;
}

void pack_quarters(const float* x, int64_t i, const Layout& at, uint8_t* code, const Instructions& with) {
    const float* const mine = x + at.begin(i);
    const float scale = scale_of_quarters(mine, at.count(i), with);
    std::memcpy(code + 4 * i, &scale, sizeof scale);
    uint8_t* out = code + at.numbers(i);
    int8_t part[BLOCK];
    for (int64_t begin = 0; begin < at.count(i); begin += BLOCK) {
        const int64_t count = std::min(BLOCK, at.count(i) - begin);
        if (std::fabs(scale) > 0)
            with.quantize_quarters(mine + begin, count, scale, part);
        else
            std::memset(part, 0, size_t(count));
        with.join_quarters(part, count, out + begin / 4);
    }
}

void pack_block(const float* x, int64_t i, const Layout& at, const Rounding& how, uint8_t* code, const Instructions& with) {
    if (at.bits == 2) return pack_quarters(x, i, at, code, with);
    const float scale = scale_of(with.largest_bits(x + at.begin(i), at.count(i)), how.most);
    std::memcpy(code + 4 * i, &scale, sizeof scale);
    uint8_t* out = code + at.numbers(i);
    int8_t part[BLOCK];
    for (int64_t begin = 0; begin < at.count(i); begin += BLOCK) {
        const int64_t count = std::min(BLOCK, at.count(i) - begin), first = at.begin(i) + begin;
        int8_t* const q = at.bits == 8 ? reinterpret_cast<int8_t*>(out + begin) : part;
        if (scale > 0)
            with.quantize(x + first, count, scale, how, uint32_t(first), q);
        else
            std::memset(q, 0, size_t(count));
        if (at.bits == 4) with.join_halves(q, count, out + begin / 2);
    }
}

void unpack_block(const uint8_t* code, int64_t i, const Layout& at, float* x, const Instructions& with) {
    float scale;
    std::memcpy(&scale, code + 4 * i, sizeof scale);
    const uint8_t* in = code + at.numbers(i);
    int8_t part[BLOCK];
    for (int64_t begin = 0; begin < at.count(i); begin += BLOCK) {
        const int64_t count = std::min(BLOCK, at.count(i) - begin);
        if (at.bits == 4) with.split_halves(in + begin / 2, count, part);
        if (at.bits == 2) with.split_quarters(in + begin / 4, count, part);
        const int8_t* const q = at.bits == 8 ? reinterpret_cast<const int8_t*>(in + begin) : part;
        with.scale(q, count, scale, x + at.begin(i) + begin);
    }
}

template <class Task>
void for_blocks(const Layout& at, int32_t threads, const Task& task) {
    const int64_t used = std::max<int64_t>(1, std::min<int64_t>(threads, at.n / SHARE));
    const int64_t tasks = used == 1 ? 1 : used * 4;
    for_each(tasks, used, [&](int64_t part) {
        const int64_t end = at.blocks() * (part + 1) / tasks;
        for (int64_t i = at.blocks() * part / tasks; i < end; ++i) task(i);
    });
}

}  // namespace

HPCSGD_API int64_t hpcsgd_pack(const float* x, int64_t n, int64_t block, int32_t bits, int32_t stochastic,
                               uint32_t draw, uint8_t* code, int32_t threads, int32_t portable) {
    const Layout at{n, block, bits};
    const Rounding how{bits == 8 ? 127 : 7, stochastic != 0, draw};
    for_blocks(at, threads, [&](int64_t i) { pack_block(x, i, at, how, code, instructions(portable)); });
    return 0;
}

HPCSGD_API int64_t hpcsgd_unpack(const uint8_t* code, int64_t n, int64_t block, int32_t bits, float* x,
                                 int32_t threads, int32_t portable) {
    const Layout at{n, block, bits};
    for_blocks(at, threads, [&](int64_t i) { unpack_block(code, i, at, x, instructions(portable)); });
    return 0;
}
