// Threads for the length of one call.
#pragma once

#include <cstdint>
#include <functional>

// Calls task(0), …, task(count - 1), each once, on at most `threads` threads, this one included.
// Returns when all are done. A task may throw std::bad_alloc: it is thrown here, and tasks not yet begun are left out.
void for_each(int64_t count, int64_t threads, const std::function<void(int64_t)>& task);
