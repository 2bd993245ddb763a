// Threads for the length of one call.
#pragma once

#include <cstdint>
#include <functional>

// Calls task(0), …, task(count - 1), each once, on at most `threads` threads, this one included.
// Returns when all are done. What a task throws is thrown here, then tasks not yet begun are left out.
void for_each(int64_t count, int64_t threads, const std::function<void(int64_t)>& task);
