// A stream: tasks in the order in which they were given, done later by a thread of their own; and events, by which
// streams wait for each other. Knows nothing of torch: the thread sanitizer looks at it alone (sanitized.cpp).
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace far {

// Microseconds of the device: not how long its tasks take here, but how long they were said to take. What a program
// takes by this clock depends on who waits for whom and not on how busy the machine is.
using Time = double;

// What this thread of the host has seen the device's clock at; what it gives to a stream cannot begin before.
Time& host_time();

// The first failure of a task since it was last asked for; as on other devices it is told late.
void note_failure(std::exception_ptr error);
void raise_failure();

// Recorded on a stream, it is reached when the stream comes there. It may be recorded again: who waits, waits for the
// version that was the last when it began.
class Event {
  public:
    uint64_t record();
    uint64_t recorded();
    void reach(uint64_t version, Time now);
    Time wait(uint64_t version);
    bool reached();
    Time when();

  private:
    std::mutex lock_;
    std::condition_variable changed_;
    uint64_t recorded_ = 0, reached_ = 0;
    Time when_ = 0;
};

class Queue {
  public:
    using Task = std::function<void()>;

    Queue();
    ~Queue();  // when all is done
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    void put(Task task, Time cost = 0);
    void record(const std::shared_ptr<Event>& event);
    void await(const std::shared_ptr<Event>& event);  // what is given later comes after it
    void wait();                                      // the host, until all that was given is done
    bool idle();
    void hold(bool held);                         // begin nothing new
    void delay(std::chrono::microseconds before);  // each task: a stream that is slow in earnest

  private:
    using Step = std::function<Time(Time)>;  // of when it begins: when it ends

    void add(Step step);
    void work();

    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<std::pair<Time, Step>> steps_;  // with when the host gave it
    uint64_t given_ = 0, done_ = 0;
    Time now_ = 0;
    bool held_ = false, ending_ = false;
    std::chrono::microseconds delay_{0};
    std::thread thread_;
};

}  // namespace far
