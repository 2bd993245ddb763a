// Devices, streams and events as torch asks for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <map>

#include "device.h"

namespace far {

namespace {

constexpr c10::StreamId POOL = 32;  // streams of a device, given away in turn

struct Registry {
    std::mutex lock;
    std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>> queues;
    std::array<std::atomic<c10::StreamId>, DEVICES> next{};
};

Registry& registry() {
    static Registry* const made = new Registry;  // its threads work until the process ends
    return *made;
}

std::array<c10::StreamId, size_t(DEVICES)>& current_streams() {
    thread_local std::array<c10::StreamId, size_t(DEVICES)> ids{};
    return ids;
}

using Handle = std::shared_ptr<Event>;  // streams may still have to do with an event that is gone

Handle& of(void* event) { return *static_cast<Handle*>(event); }

}  // namespace

c10::DeviceIndex& current_device() {
    thread_local c10::DeviceIndex index = 0;
    return index;
}

c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(FAR, device), id);
}

c10::Stream current_stream(c10::Device device) {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device();
    return stream(index, current_streams()[size_t(index)]);
}

Queue& queue_of(const c10::Stream& stream) {
    std::lock_guard guard(registry().lock);
    auto& queue = registry().queues[{stream.device_index(), stream.id()}];
    if (!queue) queue = std::make_unique<Queue>();
    return *queue;
}

std::vector<c10::Stream> streams_in_use(c10::DeviceIndex device) {
    std::lock_guard guard(registry().lock);
    std::vector<c10::Stream> found;
    for (const auto& [key, queue] : registry().queues)
        if (key.first == device) found.push_back(stream(device, key.second));
    return found;
}

c10::Stream new_stream(c10::DeviceIndex device) {
    return stream(device, 1 + registry().next[size_t(device)]++ % POOL);
}

int64_t streams_made(c10::DeviceIndex device) { return registry().next[size_t(device)]; }

void restart_pool(c10::DeviceIndex device) { registry().next[size_t(device)] = 0; }

void wait_for_device(c10::DeviceIndex device) {
    for (const c10::Stream& each : streams_in_use(device)) queue_of(each).wait();
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return FAR; }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
    c10::Device getDevice() const override { return {FAR, current_device()}; }
    void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { current_device() = device.index(); }
    c10::Device exchangeDevice(c10::Device device) const override {
        return {FAR, std::exchange(current_device(), device.index())};
    }

    c10::DeviceIndex index(c10::Device device) const {
        return device.has_index() ? device.index() : current_device();
    }
    c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(index(device)); }
    c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index(device)); }
    c10::Stream exchangeStream(c10::Stream next) const override {
        const c10::DeviceIndex device = next.device_index();
        return stream(device, std::exchange(current_streams()[size_t(device)], next.id()));
    }
    void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
    bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
    void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream, "stream"); }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        note_wait(device, "device");
        wait_for_device(device);
        raise_failure();
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        if (!*event) *event = new Handle(std::make_shared<Event>());
        queue_of(stream).record(of(*event));
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event) queue_of(stream).await(of(event));
    }
    bool queryEvent(void* event) const override { return !event || of(event)->reached(); }
    void synchronizeEvent(void* event) const override {
        if (!event) return;
        note_wait(current_device(), "event");
        host_time() = std::max(host_time(), of(event)->wait(of(event)->recorded()));
        raise_failure();
    }
    double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
        return (of(last)->when() - of(first)->when()) / 1000;  // milliseconds
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Handle*>(event);
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        note_use(data, stream);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

}  // namespace far
