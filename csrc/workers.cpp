#include "workers.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

void for_each(int64_t count, int64_t threads, const std::function<void(int64_t)>& task) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    const auto work = [&] {
        try {
            for (int64_t i; (i = next.fetch_add(1)) < count;) task(i);
        } catch (const std::bad_alloc&) {
            failed = true;
            next = count;
        }
    };
    std::vector<std::thread> others;
    try {
        const int64_t wanted = std::min(threads, count) - 1;
        if (wanted > 0) others.reserve(size_t(wanted));
        for (int64_t i = 0; i < wanted; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads to be had: those that there are do it all
    }
    work();
    for (auto& other : others) other.join();
    if (failed) throw std::bad_alloc();
}
