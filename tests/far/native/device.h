// What the parts of the device know of each other.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

#include "queue.h"

namespace far {

constexpr auto FAR = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex DEVICES = 8;

// streams.cpp

c10::DeviceIndex& current_device();  // of this thread
c10::Stream current_stream(c10::Device device);
c10::Stream stream(c10::DeviceIndex device, c10::StreamId id);  // 0: the default one
Queue& queue_of(const c10::Stream& stream);
std::vector<c10::Stream> streams_in_use(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);  // of a pool, in turn
int64_t streams_made(c10::DeviceIndex device);
void restart_pool(c10::DeviceIndex device);  // from its first stream
void wait_for_device(c10::DeviceIndex device);

// waits.cpp: when the host waited for a device, and why

void note_wait(c10::DeviceIndex device, const std::string& why);
std::vector<std::string> waits(c10::DeviceIndex device);
void forget_waits();
void wait_for(const c10::Stream& stream, const std::string& why);

// memory.cpp

c10::Allocator& memory();
void* reached(const void* far_address);  // the same memory, where kernels may touch it
void note_use(const c10::DataPtr& data, const c10::Stream& stream);

// pinned.cpp

c10::Allocator& pinned_memory();
bool is_pinned(const void* address);
void keep_pinned(const void* address, const c10::Stream& stream);  // until it has come to here

// generator.cpp

const at::Generator& default_generator(c10::DeviceIndex device);  // -1: of the current one
at::Generator new_generator(c10::DeviceIndex device);
at::Generator drawn_from(const at::Generator& generator);  // what the CPU's kernels draw from in its stead

// tensors.cpp

bool is_far(const at::Tensor& x);
at::Tensor near(const at::Tensor& x);  // the same elements, for kernels of the CPU

// operators.cpp

torch::jit::Stack operate(const char* name, torch::jit::Stack arguments);  // the results of an operator of torch
void set_costs(Time operation, Time copy);
Time copy_cost();

}  // namespace far
