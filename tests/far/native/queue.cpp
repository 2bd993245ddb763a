#include "queue.h"

#include <algorithm>
#include <utility>

namespace far {

Time& host_time() {
    thread_local Time time = 0;
    return time;
}

namespace {

struct Failure {
    std::mutex lock;
    std::exception_ptr first;
};

Failure& failure() {
    static Failure* const made = new Failure;
    return *made;
}

}  // namespace

void note_failure(std::exception_ptr error) {
    std::lock_guard guard(failure().lock);
    if (!failure().first) failure().first = std::move(error);
}

void raise_failure() {
    std::unique_lock guard(failure().lock);
    const std::exception_ptr error = std::exchange(failure().first, nullptr);
    guard.unlock();
    if (error) std::rethrow_exception(error);
}

uint64_t Event::record() {
    std::lock_guard guard(lock_);
    return ++recorded_;
}

uint64_t Event::recorded() {
    std::lock_guard guard(lock_);
    return recorded_;
}

void Event::reach(uint64_t version, Time now) {
    std::lock_guard guard(lock_);
    if (version > reached_) {
        reached_ = version;
        when_ = now;
    }
    changed_.notify_all();
}

Time Event::wait(uint64_t version) {
    std::unique_lock guard(lock_);
    changed_.wait(guard, [&] { return reached_ >= version; });
    return when_;
}

bool Event::reached() {
    std::lock_guard guard(lock_);
    return reached_ >= recorded_;
}

Time Event::when() {
    std::lock_guard guard(lock_);
    return when_;
}

Queue::Queue() : thread_([this] { work(); }) {}

Queue::~Queue() {
    {
        std::lock_guard guard(lock_);
        ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Queue::put(Task task, Time cost) {
    add([task = std::move(task), cost](Time begin) {
        task();
        return begin + cost;
    });
}

void Queue::record(const std::shared_ptr<Event>& event) {
    add([event, version = event->record()](Time begin) {
        event->reach(version, begin);
        return begin;
    });
}

void Queue::await(const std::shared_ptr<Event>& event) {
    add([event, version = event->recorded()](Time begin) { return std::max(begin, event->wait(version)); });
}

void Queue::wait() {
    std::unique_lock guard(lock_);
    const uint64_t until = given_;
    changed_.wait(guard, [&] { return done_ >= until; });
    host_time() = std::max(host_time(), now_);
}

bool Queue::idle() {
    std::lock_guard guard(lock_);
    return done_ == given_;
}

void Queue::hold(bool held) {
    {
        std::lock_guard guard(lock_);
        held_ = held;
    }
    changed_.notify_all();
}

void Queue::delay(std::chrono::microseconds before) {
    std::lock_guard guard(lock_);
    delay_ = before;
}

void Queue::add(Step step) {
    {
        std::lock_guard guard(lock_);
        steps_.emplace_back(host_time(), std::move(step));
        ++given_;
    }
    changed_.notify_all();
}

void Queue::work() {
    std::unique_lock guard(lock_);
    while (true) {
        changed_.wait(guard, [&] { return !held_ && (ending_ || !steps_.empty()); });
        if (steps_.empty()) return;
        auto [given, step] = std::move(steps_.front());
        steps_.pop_front();
        const Time begin = std::max(now_, given);
        const auto delay = delay_;
        guard.unlock();
        if (delay.count()) std::this_thread::sleep_for(delay);
        Time end = begin;
        try {
            end = step(begin);
        } catch (...) {
            note_failure(std::current_exception());
        }
        step = nullptr;  // what it kept alive goes before it counts as done
        guard.lock();
        now_ = end;
        ++done_;
        changed_.notify_all();
    }
}

}  // namespace far
