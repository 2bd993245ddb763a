// The k elements of largest magnitude of every segment of a vector: kernels in a row, none of them waited
// for.
#include "candidates.cuh"
#include "choice.cuh"
#include "device.cuh"
#include "kernels.cuh"

HPCSGD_API void hpcsgd_cuda_layout(int64_t* four) {
    four[0] = TILE;
    four[1] = GROUP;
    four[2] = SAMPLE;
    four[3] = int64_t(sizeof(Segment));
}

HPCSGD_API void hpcsgd_cuda_sample(int64_t n, int64_t* positions) {
    for (int64_t i = 0; i < SAMPLE; ++i) positions[i] = sampled_place(n, i);
}

HPCSGD_API int64_t hpcsgd_cuda_largest_bytes(int64_t segments, int64_t tiles, int64_t groups,
                                             int64_t candidates) {
    Layout layout{nullptr};
    place(layout, {segments, tiles, groups, candidates});
    return layout.bytes;
}

HPCSGD_API int32_t hpcsgd_cuda_largest(int32_t device, cudaStream_t stream, const float* x, const void* rows,
                                       int64_t segments, int64_t tiles, int64_t groups, int64_t candidates,
                                       void* memory, int64_t* out) {
    const OnDevice here(device);
    if (here.error) return here.error;
    const Segment* const table = static_cast<const Segment*>(rows);
    const int count = int(segments);
    const unsigned by_tile = unsigned(tiles), by_group = unsigned(groups);
    Layout layout{static_cast<char*>(memory)};
    const Workspace work = place(layout, {segments, tiles, groups, candidates});
    sample<<<unsigned(count), SAMPLERS, 0, stream>>>(x, table, work);
    if (candidates > 0) collect<<<by_tile, THREADS, 0, stream>>>(x, table, count, work);
    for (int i = 0; i < DIGITS; ++i)
        count_digit<<<by_group, CHOOSERS, 0, stream>>>(x, table, count, work, digit_number(i));
    count_sides<<<by_group, CHOOSERS, 0, stream>>>(x, table, count, work);
    add_up_groups<<<unsigned(count), CHOOSERS, 0, stream>>>(table, work);
    write_chosen<<<by_group, CHOOSERS, 0, stream>>>(x, table, count, work, out);
    return cudaGetLastError();
}

HPCSGD_API int32_t hpcsgd_cuda_usable(int32_t device) {
    const OnDevice here(device);
    if (here.error) return here.error;
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, sample);
}
