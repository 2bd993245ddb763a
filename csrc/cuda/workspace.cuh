// What the kernels of one `largest` leave to each other, in memory that the caller gives.
#pragma once

#include "digits.cuh"

struct State {  // of a segment
    uint32_t threshold;             // the key from which on elements are candidates
    unsigned int done;              // blocks that have added their counts of a digit
    unsigned long long candidates;  // found; those of a tile are kept only where they fit
    Sought sought;                  // in the end the k-th largest key, and how many with that key are taken
};

struct Sides {  // how many of some elements have a larger key than the k-th largest, and the same
    uint32_t above, equal;
};

struct List {  // a tile's candidates
    int64_t begin;
    int count;
};

struct Workspace {
    State* states;
    unsigned long long* bins;  // BINS of every segment
    List* lists;               // of every tile
    Sides* of_warps;           // GROUP of every group
    unsigned long long *above, *equal;  // of every group; then of all of its segment's groups before it
    float* magnitudes;    // of the candidates
    uint16_t* positions;  // of the candidates in their tile
};

// Places arrays one behind the other; without memory it only counts bytes.
struct Layout {
    char* memory;
    int64_t bytes = 0;

    template <class Element>
    Element* array(int64_t count) {
        Element* const result = memory ? reinterpret_cast<Element*>(memory + bytes) : nullptr;
        bytes += (count * int64_t(sizeof(Element)) + 255) / 256 * 256;
        return result;
    }
};

struct Sizes {
    int64_t segments, tiles, groups, candidates;
};

inline Workspace place(Layout& layout, const Sizes& sizes) {
    Workspace work;
    work.states = layout.array<State>(sizes.segments);
    work.bins = layout.array<unsigned long long>(sizes.segments * BINS);
    work.lists = layout.array<List>(sizes.tiles);
    work.of_warps = layout.array<Sides>(sizes.groups * GROUP);
    work.above = layout.array<unsigned long long>(sizes.groups);
    work.equal = layout.array<unsigned long long>(sizes.groups);
    work.magnitudes = layout.array<float>(sizes.candidates);
    work.positions = layout.array<uint16_t>(sizes.candidates);
    return work;
}
