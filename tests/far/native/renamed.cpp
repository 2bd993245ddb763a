// What torch asks of a device under another name than of a CPU, and what autocast makes narrower.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "device.h"

namespace far {

namespace {

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
    return operate("aten::convolution",
                   {x, w, b, stride, padding, dilation, transposed, output_padding, groups})[0].toTensor();
}

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three convolution_backward(const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::IntArrayRef stride,
                           c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                           c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
    const std::vector<int64_t> bias{transposed ? w.size(1) * groups : w.size(0)};
    const std::vector<bool> wanted(mask.begin(), mask.end());
    const auto made = operate("aten::convolution_backward", {g, x, w, bias, stride, padding, dilation, transposed,
                                                             output_padding, groups, wanted});
    return {made[0].toTensor(), made[1].toTensor(), made[2].toTensor()};
}

Three lstm_cell(const at::Tensor& x, const at::Tensor& h, const at::Tensor& cx, const std::optional<at::Tensor>& bx,
                const std::optional<at::Tensor>& bh) {
    at::Tensor gates = x + h;
    if (bx && bx->defined()) gates = gates + *bx + *bh;
    const auto part = gates.chunk(4, 1);
    const at::Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), c = part[2].tanh(), o = part[3].sigmoid();
    const at::Tensor cy = f * cx + i * c;
    return {o * cy.tanh(), cy, at::cat({i, f, c, o}, 1)};
}

Three lstm_cell_backward(const std::optional<at::Tensor>& ghy, const std::optional<at::Tensor>& gcy,
                         const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool bias) {
    const auto part = workspace.chunk(4, 1);
    const at::Tensor &i = part[0], &f = part[1], &c = part[2], &o = part[3], t = cy.tanh();
    const at::Tensor gh = ghy && ghy->defined() ? *ghy : at::zeros_like(cx);
    at::Tensor gc = gh * o * (1 - t * t);
    if (gcy && gcy->defined()) gc = gc + *gcy;
    const at::Tensor gates =
        at::cat({gc * c * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - c * c), gh * t * o * (1 - o)}, 1);
    return {gates, gc * f, bias ? gates.sum(0) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("convolution_overrideable", convolution);
    m.impl("convolution_backward_overrideable", convolution_backward);
    m.impl("_thnn_fused_lstm_cell", lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
    KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace

}  // namespace far
