// The memory of the devices. It is mapped twice: at the addresses that torch knows nobody may touch it, and host code
// that does ends with a segmentation fault; kernels find it elsewhere.
//
// As in torch's own caching allocators a block that was freed is given away at once to whoever asks on its stream.
// It is poisoned then, in the order of that stream: who still reads it on another one reads NaN.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "device.h"

namespace far {

namespace {

constexpr size_t ROOM = size_t(16) << 30, GRAIN = 512;  // addresses, of which few are ever used

struct Arena {
    char *far, *near;
    Arena() {
        const int file = memfd_create("far", 0);
        TORCH_CHECK(file >= 0 && ftruncate(file, ROOM) == 0, "no memory file");
        far = map(file, PROT_NONE);
        near = map(file, PROT_READ | PROT_WRITE);
        close(file);
    }
    static char* map(int file, int access) {
        void* const found = mmap(nullptr, ROOM, access, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(found != MAP_FAILED, "no room for the memory of the far devices");
        return static_cast<char*>(found);
    }
};

const Arena& arena() {
    static const Arena* const made = new Arena;
    return *made;
}

struct Block {
    char* place;
    size_t bytes;
    c10::Stream home;  // the stream that it was asked for on
    std::set<c10::StreamId> users;
};

void poison(const Block& block) {
    queue_of(block.home).put([place = block.place, bytes = block.bytes] {
        std::memset(reached(place), 0xff, bytes);
    });
}

class Memory final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t n) override {
        const c10::Device device(FAR, current_device());
        if (n == 0) return {nullptr, nullptr, &release, device};
        Block* const block = taken((n + GRAIN - 1) / GRAIN * GRAIN, current_stream(device));
        poison(*block);
        return {block->place, block, &release, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not on this device"); }
    void use(Block* block, const c10::Stream& stream) {
        std::lock_guard guard(lock_);
        if (stream != block->home) block->users.insert(stream.id());
    }

  private:
    static void release(void* context);

    Block* taken(size_t bytes, const c10::Stream& home) {
        std::lock_guard guard(lock_);
        auto& fitting = free_[{home.device_index(), home.id(), bytes}];
        if (!fitting.empty()) {
            Block* const block = fitting.back();
            fitting.pop_back();
            return block;
        }
        TORCH_CHECK(used_ + bytes + GRAIN < ROOM, "the far devices are out of memory");
        auto* const block = new Block{arena().far + used_, bytes, home, {}};
        used_ += bytes + GRAIN;  // between two blocks there is a gap
        return block;
    }

    // Any thread may free a block, also one of another device in which garbage happens to be collected: its clock must
    // not move that of this block's stream.
    void give_back(Block* block) {
        const Time host = std::exchange(host_time(), 0);
        std::lock_guard guard(lock_);
        for (const c10::StreamId user : std::exchange(block->users, {})) {
            const auto through = std::make_shared<Event>();
            queue_of(stream(block->home.device_index(), user)).record(through);
            queue_of(block->home).await(through);
        }
        poison(*block);
        free_[{block->home.device_index(), block->home.id(), block->bytes}].push_back(block);
        host_time() = host;
    }

    std::mutex lock_;
    size_t used_ = GRAIN;
    std::map<std::tuple<c10::DeviceIndex, c10::StreamId, size_t>, std::vector<Block*>> free_;
};

Memory& the_memory() {
    static Memory* const made = new Memory;
    return *made;
}

void Memory::release(void* context) {
    if (context) the_memory().give_back(static_cast<Block*>(context));
}

const bool memory_installed = (c10::SetAllocator(FAR, &the_memory()), true);

}  // namespace

c10::Allocator& memory() { return the_memory(); }

void* reached(const void* far_address) {
    return arena().near + (static_cast<const char*>(far_address) - arena().far);
}

void note_use(const c10::DataPtr& data, const c10::Stream& stream) {
    if (data.get_context()) the_memory().use(static_cast<Block*>(data.get_context()), stream);
}

}  // namespace far
