#include "grid.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#endif

#ifndef __x86_64__
#error "stacks are switched by instructions of x86-64"
#endif

Dimension threadIdx, blockIdx;

// Goes on with the stack `to`, and leaves in *from where this one is to be gone on with.
extern "C" void switch_stack(void** from, void* to);
asm(R"(
.text
switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace grid {
namespace {

constexpr int SIDE_BY_SIDE = 6, MOST_THREADS = 1024;
// No power of two: the tops of all stacks would want the same lines of a cache. What reports errors needs more.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK = (256 << 10) + 192;
#else
constexpr size_t STACK = (12 << 10) + 192;
#endif
constexpr size_t SHARED = 64 << 10, GAP = 32;

class Chance {
public:
    explicit Chance(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
    unsigned below(unsigned n) {  // xorshift, G. Marsaglia
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return unsigned((state_ >> 32) % n);
    }

private:
    uint64_t state_;
};

struct Fiber {
    void* top;
    const Place* waits_at;
    bool over;
    bool turn;  // which half of Block::given is next: a lane may be one exchange ahead of another
};

struct Region {
    size_t offset, bytes;
};

struct Block {
    unsigned number = 0;
    int threads = 0;
    std::vector<Fiber> fibers = std::vector<Fiber>(MOST_THREADS);
    char* stacks = nullptr;
    uint64_t given[2][MOST_THREADS];
    alignas(16) char shared[SHARED];
};

Chance chance(1);
std::vector<Region> regions;  // of shared memory
size_t reserved = 0;
Block* block = nullptr;  // of the fiber that runs
int running = 0, left = 0, first = 0, last = 0;  // it; lanes still to run in this turn of warp [first, last)
void* scheduler = nullptr;
Body body = nullptr;
const void* kernel = nullptr;

[[noreturn]] void fail(const char* what, const Place* place) {
    std::fprintf(stderr, "block %u: %s (%s)\n", block->number, what, place ? place->where : "at its end");
    std::abort();
}

// The next lane of the warp goes on, or who called the warp.
void hand_over() {
    void** const own = &block->fibers[running].top;
    if (--left == 0) return switch_stack(own, scheduler);
    running = running + 1 == last ? first : running + 1;
    threadIdx.x = unsigned(running);
    switch_stack(own, block->fibers[running].top);
}

void fiber() {
    body(kernel);
    block->fibers[running].over = true;
    block->fibers[running].waits_at = nullptr;
    hand_over();
    std::abort();
}

void begin(Block& in, unsigned number, int threads) {
    if (!in.stacks) {
        void* const memory = mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        in.stacks = static_cast<char*>(memory);
    }
    in.number = number;
    in.threads = threads;
    for (const Region& region : regions) {
        std::memset(in.shared + region.offset, int(chance.below(256)), region.bytes);
        ASAN_POISON_MEMORY_REGION(in.shared + region.offset + region.bytes, GAP);
    }
    for (int t = 0; t < threads; ++t) {
        void** top = reinterpret_cast<void**>(in.stacks + (t + 1) * STACK);
        *--top = nullptr;  // as if it had been called: an address to return to, below 16 aligned bytes
        *--top = reinterpret_cast<void*>(&fiber);
        for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
        in.fibers[t] = {top, nullptr, false, false};
    }
}

// Takes a warp to its next place; false where it is over or waits for its block.
bool advance(Block& in, int warp) {
    block = &in;
    first = warp * LANES;
    last = std::min(first + LANES, in.threads);
    Fiber* const lanes = in.fibers.data() + first;
    if (lanes->over || (lanes->waits_at && lanes->waits_at->whole_block)) return false;
    left = last - first;
    running = first + int(chance.below(unsigned(left)));
    threadIdx.x = unsigned(running);
    blockIdx.x = in.number;
    switch_stack(&scheduler, in.fibers[running].top);
    const Place* const place = lanes->waits_at;
    for (int i = 1; i < last - first; ++i)
        if (lanes[i].waits_at != place || lanes[i].over != lanes->over)
            fail("lanes of a warp in different places", place);
    return true;
}

// No warp can go on: the block's barrier opens. False where all threads are over.
bool pass_barrier(Block& in) {
    block = &in;
    const Place* const place = in.fibers[0].waits_at;
    for (int t = 0; t < in.threads; ++t)
        if (in.fibers[t].waits_at != place) fail("not all threads come to a barrier", place);
    if (!place) return false;
    for (int t = 0; t < in.threads; ++t) in.fibers[t].waits_at = nullptr;
    return true;
}

// Some warp goes on, now a step, now as far as it can.
bool move(Block& in) {
    const unsigned warps = unsigned(in.threads + LANES - 1) / LANES, from = chance.below(warps);
    for (unsigned i = 0; i < warps; ++i) {
        const int warp = int((from + i) % warps);
        if (!advance(in, warp)) continue;
        for (unsigned more = chance.below(chance.below(2) ? 64 : 4); more > 0 && advance(in, warp);) --more;
        return true;
    }
    return pass_barrier(in);
}

}  // namespace

void run(unsigned blocks, unsigned threads, Body of, const void* what) {
    static std::vector<Block> room(SIDE_BY_SIDE);
    body = of;
    kernel = what;
    std::vector<unsigned> waiting(blocks);
    std::iota(waiting.begin(), waiting.end(), 0u);
    std::vector<Block*> under_way;
    const auto start = [&](Block& in) {
        std::swap(waiting[chance.below(unsigned(waiting.size()))], waiting.back());
        begin(in, waiting.back(), int(threads));
        waiting.pop_back();
    };
    for (Block& in : room)
        if (!waiting.empty()) {
            start(in);
            under_way.push_back(&in);
        }
    const unsigned loyalty = 1u << chance.below(9);  // turns that a block has in a row, on the mean
    size_t turn = 0;
    while (!under_way.empty()) {
        if (turn >= under_way.size() || chance.below(loyalty) == 0)
            turn = chance.below(unsigned(under_way.size()));
        if (move(*under_way[turn])) continue;
        if (!waiting.empty()) start(*under_way[turn]);
        else under_way.erase(under_way.begin() + ptrdiff_t(turn));
    }
}

void seed(uint64_t number) { chance = Chance(number); }

void wait_at(const Place& place) {
    block->fibers[running].waits_at = &place;
    hand_over();
}

const uint64_t* exchange(uint64_t value, const Place& place) {
    Fiber& own = block->fibers[running];
    own.turn = !own.turn;
    uint64_t* const given = block->given[own.turn];
    given[running] = value;
    wait_at(place);
    return given + first;
}

int lane() { return running - first; }

size_t reserve(size_t bytes) {
    const size_t offset = reserved;
    reserved += (bytes + 15) / 16 * 16 + GAP;
    if (reserved > SHARED) std::abort();
    regions.push_back({offset, bytes});
    return offset;
}

void* memory_at(size_t offset) { return block->shared + offset; }

}  // namespace grid
