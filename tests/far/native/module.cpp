// What tests and torch.far call: torch.ops.far.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "device.h"

namespace far {

namespace {

c10::DeviceIndex index(int64_t device) { return static_cast<c10::DeviceIndex>(device); }

void delay(int64_t device, int64_t id, int64_t microseconds) {
    queue_of(stream(index(device), id)).delay(std::chrono::microseconds(microseconds));
}

void reset() {  // as if it had just been made, but for what is in its memory
    for (c10::DeviceIndex device = 0; device < DEVICES; ++device)
        for (const c10::Stream& each : streams_in_use(device)) {
            queue_of(each).hold(false);
            queue_of(each).delay(std::chrono::microseconds(0));
        }
    for (c10::DeviceIndex device = 0; device < DEVICES; ++device) {
        wait_for_device(device);
        restart_pool(device);
    }
    set_costs(0, 0);
    forget_waits();
    raise_failure();
}

TORCH_LIBRARY(far, m) {
    m.def("get_device() -> int", [] { return int64_t(current_device()); });
    m.def("set_device(int device) -> ()", [](int64_t device) { current_device() = index(device); });
    m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) {
        at::Generator(default_generator(index(device))).set_current_seed(uint64_t(seed));
    });
    m.def("rng_state(int device) -> Tensor", [](int64_t device) { return default_generator(index(device)).get_state(); });
    m.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
        at::Generator(default_generator(index(device))).set_state(state);
    });
    m.def("streams(int device) -> int", [](int64_t device) { return streams_made(index(device)); });
    m.def("restart_streams(int device) -> ()", [](int64_t device) { restart_pool(index(device)); });
    m.def("hold(int device, int stream, bool held) -> ()", [](int64_t device, int64_t id, bool held) {
        queue_of(stream(index(device), id)).hold(held);
    });
    m.def("delay(int device, int stream, int microseconds) -> ()", delay);
    m.def("costs(float operation, float copy) -> ()", set_costs);
    m.def("waits(int device) -> str[]", [](int64_t device) { return waits(index(device)); });
    m.def("forget_waits() -> ()", forget_waits);
    m.def("reset() -> ()", reset);
}

}  // namespace

}  // namespace far
