#include "device.h"

#include <array>

namespace far {

namespace {

struct Waits {
    std::mutex lock;
    std::array<std::vector<std::string>, DEVICES> of;
};

Waits& all_waits() {
    static Waits* const made = new Waits;
    return *made;
}

}  // namespace

void note_wait(c10::DeviceIndex device, const std::string& why) {
    std::lock_guard guard(all_waits().lock);
    all_waits().of[size_t(device)].push_back(why);
}

std::vector<std::string> waits(c10::DeviceIndex device) {
    std::lock_guard guard(all_waits().lock);
    return all_waits().of[size_t(device)];
}

void forget_waits() {
    std::lock_guard guard(all_waits().lock);
    for (auto& each : all_waits().of) each.clear();
}

void wait_for(const c10::Stream& stream, const std::string& why) {
    note_wait(stream.device_index(), why);
    queue_of(stream).wait();
    raise_failure();
}

}  // namespace far
