// Every other operator: shapes now, by torch's meta kernels, and the numbers later, by those of the CPU.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>

#include "device.h"

namespace far {

namespace {

using c10::IValue;
using torch::jit::Stack;

struct Costs {
    std::atomic<Time> operation{0}, copy{0};
};

Costs& costs() {
    static Costs made;
    return made;
}

template <class F>
IValue each_tensor(const IValue& value, F f) {
    if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> made;
        for (const at::Tensor& x : value.toTensorList()) made.push_back(x.defined() ? f(x) : x);
        return made;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> made;
        for (const std::optional<at::Tensor>& x : value.toOptionalTensorList())
            made.push_back(x && x->defined() ? std::optional<at::Tensor>(f(*x)) : x);
        return made;
    }
    return value;
}

c10::Device device_of(const Stack& arguments) {
    std::optional<c10::Device> found;
    for (const IValue& a : arguments) {
        each_tensor(a, [&](const at::Tensor& x) {
            if (is_far(x) && !found) found = x.device();
            return x;
        });
        if (a.isDevice() && a.toDevice().type() == FAR && !found) found = a.toDevice();
    }
    return found && found->has_index() ? *found : c10::Device(FAR, current_device());
}

// One operator that was called: on what, and what becomes of its arguments for kernels of the CPU (`near`) and
// for those that only tell shapes (`shapes`).
struct Call {
    const c10::OperatorHandle& op;
    Stack arguments;
    c10::Device device;
    Stack near{}, shapes{};

    Call(const c10::OperatorHandle& called, Stack on) : op(called), arguments(std::move(on)), device(device_of(arguments)) {}
    const c10::FunctionSchema& schema() const { return op.schema(); }
};

void require_on_one_device(const Call& call) {
    for (size_t i = 0; i < call.arguments.size(); ++i) {
        if (call.arguments[i].isOptionalTensorList()) continue;  // indices may be on the host
        const auto* alias = call.schema().arguments()[i].alias_info();
        const bool written = alias && alias->isWrite();
        each_tensor(call.arguments[i], [&](const at::Tensor& x) {
            TORCH_CHECK(x.device() == call.device || (x.is_cpu() && x.dim() == 0 && !written),
                        "Expected all tensors to be on the same device: ", call.schema().name(), " of one on ",
                        call.device, " and one on ", x.device());
            return x;
        });
    }
}

at::Tensor copied(const at::Tensor& x) {  // a number of the host's, or its indices
    at::Tensor copy = x.clone();
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
}

at::Tensor shape_of(const at::Tensor& x) {
    return is_far(x) ? at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta)) : x;
}

void translate(Call& call) {
    for (size_t i = 0; i < call.arguments.size(); ++i) {
        const IValue& a = call.arguments[i];
        const bool is_default = a.isNone() && call.schema().arguments()[i].name() == "generator";
        if (a.isGenerator() || is_default) {
            const at::Generator g = is_default ? default_generator(call.device.index()) : a.toGenerator();
            call.near.emplace_back(g.device().type() == FAR ? drawn_from(g) : g);
            call.shapes.emplace_back();
        } else if (a.isDevice()) {
            call.near.emplace_back(c10::Device(at::kCPU));
            call.shapes.emplace_back(c10::Device(at::kMeta));
        } else {
            call.near.push_back(each_tensor(a, [](const at::Tensor& x) { return is_far(x) ? near(x) : copied(x); }));
            call.shapes.push_back(each_tensor(a, shape_of));
        }
    }
}

bool has_known_shapes(const Call& call) {
    if (call.op.hasTag(at::Tag::dynamic_output_shape) || call.op.hasTag(at::Tag::data_dependent_output)) return false;
    for (const auto& r : call.schema().returns())
        if (!r.type()->isSubtypeOf(*c10::TensorType::get()) && !r.type()->isSubtypeOf(*c10::ListType::ofTensors()))
            return false;
    return true;
}

// The results as tensors without memory; none where only the numbers tell their shapes.
std::optional<Stack> foretold(const Call& call) {
    if (!has_known_shapes(call)) return std::nullopt;
    try {
        const at::AutoDispatchBelowADInplaceOrView below;
        Stack results = call.shapes;
        call.op.callBoxed(&results);
        return results;
    } catch (const std::exception&) {
        return std::nullopt;  // there is no such kernel; what is wrong with the arguments the CPU's will say
    }
}

Stack computed(const c10::OperatorHandle& op, const Stack& near) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Stack results = near;
    op.callBoxed(&results);
    return results;
}

// The argument that is returned as result r, or none.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema, size_t r) {
    const auto* result = schema.returns()[r].alias_info();
    if (!result || !result->isWrite()) return std::nullopt;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* argument = schema.arguments()[i].alias_info();
        if (argument && argument->beforeSets() == result->beforeSets()) return i;
    }
    TORCH_CHECK(false, schema.name(), ": what it returns is not among its arguments");
}

// Where numbers go that a kernel returns in memory of its own: (which result, memory on the device).
struct Room {
    std::vector<std::pair<size_t, at::Tensor>> of;

    void fill(const Stack& results) const {
        size_t in_list = 0, last = SIZE_MAX;
        for (const auto& [r, x] : of) {
            in_list = r == last ? in_list + 1 : 0;
            last = r;
            const at::Tensor found =
                results[r].isTensor() ? results[r].toTensor() : results[r].toTensorList().get(in_list);
            if (x.defined() && found.numel()) x.copy_(found);  // none: statistics of a batch_norm in use
        }
    }
};

at::Tensor fresh(Call& call, Room& room, size_t r, const at::Tensor& like) {
    if (!like.defined()) {
        room.of.emplace_back(r, like);
        return like;
    }
    at::Tensor made = at::empty_strided(like.sizes(), like.strides(), like.options().device(call.device));
    room.of.emplace_back(r, near(made));
    return made;
}

// The argument that the kernel writes, made as large as its result.
at::Tensor grown(Call& call, size_t argument, const at::Tensor& result) {
    at::Tensor mine = call.arguments[argument].toTensor();
    if (mine.sizes() != result.sizes()) {
        mine.resize_(result.sizes());
        call.near[argument] = near(mine);
    }
    return mine;
}

// Put results of these shapes on the stack; say where their numbers belong.
Room laid_out(Call& call, const Stack& results, Stack& stack) {
    Room room;
    for (size_t r = 0; r < call.schema().returns().size(); ++r) {
        if (const auto argument = written_argument(call.schema(), r)) {
            torch::jit::push(stack, grown(call, *argument, results[r].toTensor()));
        } else if (results[r].isTensor()) {
            torch::jit::push(stack, fresh(call, room, r, results[r].toTensor()));
        } else if (results[r].isTensorList()) {
            std::vector<at::Tensor> made;
            for (const at::Tensor& x : results[r].toTensorList()) made.push_back(fresh(call, room, r, x));
            torch::jit::push(stack, made);
        } else {
            torch::jit::push(stack, results[r]);
        }
    }
    return room;
}

void do_later(Call& call, const Stack& shapes, Stack& stack) {
    const Room room = laid_out(call, shapes, stack);
    queue_of(current_stream(call.device))
        .put([op = call.op, near = call.near, room] { room.fill(computed(op, near)); }, costs().operation);
}

void do_now(Call& call, Stack& stack) {
    const c10::Stream stream = current_stream(call.device);
    wait_for(stream, call.schema().name());
    const Stack results = computed(call.op, call.near);
    const Room room = laid_out(call, results, stack);
    queue_of(stream).wait();  // its memory is poisoned by the stream
    const at::AutoDispatchBelowADInplaceOrView below;
    room.fill(results);
    for (size_t r = 0; r < call.schema().returns().size(); ++r)  // of an argument that had to grow
        if (const auto argument = written_argument(call.schema(), r))
            near(call.arguments[*argument].toTensor()).copy_(results[r].toTensor());
}

void any(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    raise_failure();
    Call call(op, torch::jit::pop(*stack, op.schema().arguments().size()));
    const c10::DeviceGuard guard(call.device);
    require_on_one_device(call);
    translate(call);
    if (const auto shapes = foretold(call))
        do_later(call, *shapes, *stack);
    else
        do_now(call, *stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any>()); }

// For these torch has another way for devices than for the CPU, which does not come to the same bits.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    for (const char* name : {"addr", "mish_backward", "native_group_norm", "native_layer_norm", "silu_backward"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&any>());
}

}  // namespace

Stack operate(const char* name, Stack arguments) {
    any(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), {}, &arguments);
    return arguments;
}

void set_costs(Time operation, Time copy) {
    costs().operation = operation;
    costs().copy = copy;
}

Time copy_cost() { return costs().copy; }

}  // namespace far
