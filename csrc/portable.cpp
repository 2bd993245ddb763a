// The inner loops in plain C++, which a compiler may vectorize for any CPU.
#include <cstring>

#include "elements.h"
#include "instructions.h"
#include "kernels.h"
#include "magnitude.h"
#include "packing.h"

namespace {

bool any_passes(const float* x, int32_t floor) {
    uint32_t any = 0;
    for (int64_t j = 0; j < WORD; ++j) any |= int32_t(magnitude_bits(x[j])) > floor;
    return any != 0;
}

int64_t passing(const float* x, int64_t count, int32_t floor, Hit* hits) {
    int64_t found = 0, i = 0;
    for (; i + WORD <= count; i += WORD)
        if (any_passes(x + i, floor)) hits[found++] = {uint32_t(i / WORD), mask_of(x + i, WORD, floor)};
    hits[found] = {uint32_t(i / WORD), mask_of(x + i, count - i, floor)};
    return found + (hits[found].mask != 0);
}

template <class Element>
double add(float* acc, typename Element::Bits* g, int64_t count) {
    double lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t j = 0; j < LANES; ++j) add_one<Element>(acc + i + j, g + i + j, lanes + j);
    for (; i < count; ++i) add_one<Element>(acc + i, g + i, lanes + i % LANES);
    return total(lanes);
}

constexpr Instructions PORTABLE = {
    "portable",   passing,        add<Float32>, add<BFloat16>, add<Float16>,
    largest_bits, quantize_block, scale_block,  join_halves,   split_halves,
    add_spread,   quantize_quarters, join_quarters, split_quarters};

}  // namespace

const Instructions& portable_instructions() { return PORTABLE; }

const Instructions& best_instructions() {
    static const Instructions* avx2 = avx2_instructions();
    return avx2 ? *avx2 : PORTABLE;
}

const char* hpcsgd_instructions() { return best_instructions().name; }
