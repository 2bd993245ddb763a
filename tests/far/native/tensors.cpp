// Tensors and their views, and copies between the host and a device.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"

namespace far {

bool is_far(const at::Tensor& x) { return x.defined() && x.device().type() == FAR; }

at::Tensor near(const at::Tensor& x) {
    const auto options = x.options().device(at::kCPU);
    if (x.numel() == 0 || x.storage().data() == nullptr) return at::empty_strided(x.sizes(), x.strides(), options);
    return at::from_blob(reached(x.data_ptr()), x.sizes(), x.strides(), options);
}

namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(size, &memory(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(size, stride, &memory(), KEYS, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
    return at::cpu::as_strided(x, size, stride, offset);
}

at::Tensor view(const at::Tensor& x, c10::IntArrayRef size) { return at::native::view(x, size); }

at::Tensor reshape_alias(const at::Tensor& x, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(x, size, stride);
}

at::Tensor unfold(const at::Tensor& x, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(x, dimension, size, step);
}

const at::Tensor& resize_(const at::Tensor& x, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    return at::native::resize_(x, size, format);
}

at::Tensor& set_storage(at::Tensor& x, at::Storage storage) { return at::native::set_(x, std::move(storage)); }

at::Tensor& set_storage_at(at::Tensor& x, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                           c10::IntArrayRef stride) {
    return at::cpu::set_(x, std::move(storage), offset, size, stride);
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) { return at::native::set_tensor_(x, source); }

at::Tensor blob(const at::Tensor& x) {  // without x: a task may end last, and where nobody has Python's lock
    return is_far(x) ? near(x) : at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options());
}

// Between the host and a device the host waits, as it does elsewhere, unless its memory is pinned and it is told not
// to.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    const bool inside = is_far(from) && is_far(to);
    const at::Tensor& there = is_far(to) ? to : from;
    const at::Tensor& here = is_far(to) ? from : to;
    const c10::Stream stream = current_stream(there.device());
    if (from.numel())
        queue_of(stream).put(
            [a = blob(from), b = blob(to)] {
                const at::AutoDispatchBelowADInplaceOrView below;
                b.copy_(a);
            },
            inside ? 0 : copy_cost());
    if (inside || from.numel() == 0) return to;
    if (non_blocking && is_pinned(here.data_ptr()))
        keep_pinned(here.data_ptr(), stream);
    else
        wait_for(stream, "copy");
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& x) {
    wait_for(current_stream(x.device()), "item");
    return near(x).item();
}

void record_stream(at::Tensor& x, c10::Stream stream) { note_use(x.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("unfold", unfold);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage_at);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("record_stream", record_stream);
}

}  // namespace

}  // namespace far
