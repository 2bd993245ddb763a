// The state behind cuda_runtime.h, and how tests see it.
#include "cuda_runtime.h"

#define VISIBLE extern "C" __attribute__((visibility("default")))

int current_device = 0;
cudaError_t last_error = cudaSuccess;

namespace {

Stream streams[DEVICES] = {{0}, {1}, {2}, {3}};

}  // namespace

VISIBLE void stand_in_seed(uint64_t number) { grid::seed(number); }
VISIBLE Stream* stand_in_stream(int device) { return &streams[device]; }
VISIBLE int stand_in_device() { return current_device; }
VISIBLE void stand_in_current(int device) { current_device = device; }
