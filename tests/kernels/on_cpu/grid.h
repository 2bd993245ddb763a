// A CUDA grid on one thread of a CPU, for tests. Every thread of a block is a fiber. Some blocks are under way
// side by side; which warp goes on, up to the next place where it waits for its own lanes or for its block, is
// drawn each time. Blocks begin in any order, with garbage in shared memory. Where not all lanes of a warp, or
// not all threads of a block, come to the same place, it is told and the program ends.
//
// What it cannot show: warps whose lanes drift apart, and what the memory model of a GPU allows beyond an order
// of steps (a missing __threadfence).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

struct Dimension {
    unsigned x;
};

// Of the fiber that runs.
extern Dimension threadIdx, blockIdx;

namespace grid {

constexpr int LANES = 32;

// A place in the code where threads wait for each other.
struct Place {
    bool whole_block;
    const char* where;
};

// Returns when all lanes of the warp, or all threads of the block, have come to `place`.
void wait_at(const Place& place);

// Likewise; what all lanes of the warp have given, until the next time.
const uint64_t* exchange(uint64_t value, const Place& place);

int lane();

// Of how blocks, warps and lanes take turns.
void seed(uint64_t number);

using Body = void (*)(const void* kernel);
void run(unsigned blocks, unsigned threads, Body body, const void* kernel);

template <class Kernel>
void launch(unsigned blocks, unsigned threads, const Kernel& kernel) {
    run(blocks, threads, [](const void* kernel) { (*static_cast<const Kernel*>(kernel))(); }, &kernel);
}

size_t reserve(size_t bytes);
void* memory_at(size_t offset);

// Shared memory: each declaration has its place in that of every block.
template <class T>
class Shared {
public:
    Shared() : offset_(reserve(sizeof(T))) {}
    T& operator*() const { return *static_cast<T*>(memory_at(offset_)); }

private:
    const size_t offset_;
};

template <class To, class From>
To copied_bits(From from) {
    static_assert(sizeof(From) <= sizeof(To) || sizeof(To) <= sizeof(From));
    To to{};
    std::memcpy(&to, &from, sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
    return to;
}

// What another lane has given. `from` tells which, by the lane's own number.
template <class T, class From>
T from_lane(T value, const Place& place, From from) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    return copied_bits<T>(exchange(copied_bits<uint64_t>(value), place)[from(lane())]);
}

// Bit l is what lane l has given.
inline uint32_t ballot(bool condition, const Place& place) {
    const uint64_t* const given = exchange(condition, place);
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; ++lane) bits |= uint32_t(given[lane]) << lane;
    return bits;
}

}  // namespace grid
