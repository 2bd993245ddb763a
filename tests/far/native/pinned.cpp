// Memory of the host that devices copy to and from by themselves. What was freed is given away again when the copies
// that were begun are through, and is poisoned then.
#include <cstdlib>
#include <cstring>
#include <map>

#include "device.h"

namespace far {

namespace {

constexpr size_t ALIGNMENT = 512;

struct Lent {
    size_t bytes;
    std::vector<std::shared_ptr<Event>> copies;  // that have to do with it
    bool through() {
        for (const auto& copy : copies)
            if (!copy->reached()) return false;
        return true;
    }
};

class Pinned final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t n) override {
        const size_t bytes = (n / ALIGNMENT + 1) * ALIGNMENT;
        std::lock_guard guard(lock_);
        char* const place = taken(bytes);
        std::memset(place, 0xff, bytes);
        return {place, place, &release, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

    bool has(const void* address) {
        std::lock_guard guard(lock_);
        return found(address) != nullptr;
    }
    void keep(const void* address, const std::shared_ptr<Event>& until) {
        std::lock_guard guard(lock_);
        found(address)->copies.push_back(until);
    }

  private:
    static void release(void* context);

    char* taken(size_t bytes) {
        for (auto& place : free_) {
            Lent& block = blocks_.at(place);
            if (block.bytes != bytes || !block.through()) continue;
            block.copies.clear();
            std::swap(place, free_.back());
            char* const mine = free_.back();
            free_.pop_back();
            return mine;
        }
        auto* const fresh = static_cast<char*>(std::aligned_alloc(ALIGNMENT, bytes));
        blocks_[fresh] = Lent{bytes, {}};
        return fresh;
    }

    Lent* found(const void* address) {
        auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
        if (after == blocks_.begin()) return nullptr;
        --after;
        return static_cast<const char*>(address) < after->first + after->second.bytes ? &after->second : nullptr;
    }

    std::mutex lock_;
    std::map<char*, Lent> blocks_;
    std::vector<char*> free_;
};

Pinned& pinned() {
    static Pinned* const made = new Pinned;
    return *made;
}

void Pinned::release(void* context) {
    std::lock_guard guard(pinned().lock_);
    pinned().free_.push_back(static_cast<char*>(context));
}

}  // namespace

c10::Allocator& pinned_memory() { return pinned(); }

bool is_pinned(const void* address) { return pinned().has(address); }

void keep_pinned(const void* address, const c10::Stream& stream) {
    const auto event = std::make_shared<Event>();
    queue_of(stream).record(event);
    pinned().keep(address, event);
}

}  // namespace far
