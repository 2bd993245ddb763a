// Random numbers: those that a CPU would draw, in the order of the stream. Torch is told of the device by its hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>

#include "device.h"

namespace far {

namespace {

struct Generator final : at::CPUGeneratorImpl {
    at::Generator inner = at::detail::createCPUGenerator();

    explicit Generator(c10::DeviceIndex index) {
        device_ = c10::Device(FAR, index);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
    void set_current_seed(uint64_t seed) override { settled().set_current_seed(seed); }
    uint64_t current_seed() const override { return inner.current_seed(); }
    uint64_t seed() override { return settled().seed(); }
    void set_state(const c10::TensorImpl& state) override {
        settled();
        inner.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        settled();
        return inner.unsafeGetGeneratorImpl()->get_state();
    }

  private:
    at::Generator settled() const {  // numbers that were asked for have been drawn
        note_wait(device_.index(), "generator");
        wait_for_device(device_.index());
        return inner;
    }
};

std::vector<at::Generator> one_for_each() {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex device = 0; device < DEVICES; ++device)
        made.push_back(at::make_generator<Generator>(device));
    return made;
}

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
    static const auto* const made = new std::vector<at::Generator>(one_for_each());
    return (*made)[size_t(device < 0 ? current_device() : device)];
}

at::Generator new_generator(c10::DeviceIndex device) {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

at::Generator drawn_from(const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex device) const override { current_device() = device; }
    c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        return std::exchange(current_device(), device);
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
    c10::Device getDeviceFromPtr(void*) const override { return {FAR, current_device()}; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        c10::DataPtr fresh = memory().allocate(bytes);
        if (const size_t kept = std::min(bytes, storage.nbytes()))
            queue_of(current_stream(storage.device())).put([to = reached(fresh.get()), from = reached(storage.data()), kept] {
                std::memcpy(to, from, kept);
            });
        storage.set_data_ptr_noswap(std::move(fresh));
        storage.set_nbytes(bytes);
    }
};

const bool hooks_installed = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

}  // namespace far
