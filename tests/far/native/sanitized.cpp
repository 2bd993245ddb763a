// Streams and events under load, for the thread sanitizer: producers and consumers of slots without a lock of their
// own, which are ordered by events alone. Prints "ok"; a race is the sanitizer's to tell.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "queue.h"

namespace {

constexpr int ROUNDS = 300, STREAMS = 4, SLOTS = 8;

void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
}

// Each stream in turn adds one to every slot; only events keep them apart.
void hand_round() {
    std::vector<far::Queue> streams(STREAMS);
    std::vector<int> slots(SLOTS, 0);
    std::shared_ptr<far::Event> last;
    for (int round = 0; round < ROUNDS; ++round)
        for (far::Queue& stream : streams) {
            if (last) stream.await(last);
            stream.put([&slots] {
                for (int& slot : slots) ++slot;
            });
            last = std::make_shared<far::Event>();
            stream.record(last);
        }
    last->wait(last->recorded());
    for (const int slot : slots) require(slot == ROUNDS * STREAMS, "a round was lost");
}

// An event that is recorded again and again; a host thread for each stream gives tasks and waits.
void record_again() {
    far::Queue producer, consumer;
    const auto ready = std::make_shared<far::Event>(), taken = std::make_shared<far::Event>();
    int slot = 0, sum = 0;
    for (int round = 1; round <= ROUNDS; ++round) {
        producer.await(taken);
        producer.put([&slot, round] { slot = round; });
        producer.record(ready);
        consumer.await(ready);
        consumer.put([&slot, &sum] { sum += slot; });
        consumer.record(taken);
    }
    consumer.wait();
    require(sum == ROUNDS * (ROUNDS + 1) / 2, "a value was read twice, or never");
}

void many_hosts() {
    far::Queue stream;
    int count = 0;
    std::vector<std::thread> hosts;
    for (int host = 0; host < STREAMS; ++host)
        hosts.emplace_back([&] {
            for (int round = 0; round < ROUNDS; ++round) stream.put([&count] { ++count; }, 1.0);
            stream.wait();
            require(far::host_time() >= ROUNDS, "the clock stood still");
        });
    stream.hold(true);
    stream.hold(false);
    for (std::thread& host : hosts) host.join();
    require(stream.idle() && count == ROUNDS * STREAMS, "a task was lost");
}

void failures() {
    far::Queue stream;
    stream.put([] { throw std::runtime_error("planted"); });
    stream.wait();
    try {
        far::raise_failure();
    } catch (const std::runtime_error&) {
        return far::raise_failure();
    }
    require(false, "a failure was not told");
}

}  // namespace

int main() {
    hand_round();
    record_again();
    many_hosts();
    failures();
    std::puts("ok");
}
