"""Idioms of other people's code give the numbers of one process, or an error of one line."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hpcsgd
from hpcsgd import DistributedOptimizer, UserError, bsp
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from methods.table import OF_INTERVALS
from references import batch, loss, vector
from references import model as make_model

STEPS = 3
SHAPES = [(2, 2), (1, 1), (1, 2), (3, 1)]
Body = Callable[[Any, optim.Optimizer, Callable[[int], None]], object]
"""What a script does with a model, its optimizer, and the backward pass of step t."""


def sgd(net: nn.Module) -> optim.Optimizer:
    return optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(N: int, body: Body, inner: Callable[[nn.Module], optim.Optimizer] = sgd) -> Tensor:
    net = make_model()

    def backward(t: int) -> None:
        torch.stack([loss(net, *batch(t, rank)) for rank in range(N)]).mean().backward()

    body(net, inner(net), backward)
    return vector(net)


def on_ranks(
    world: Communicator,
    P: int,
    body: Body,
    inner: Callable[[nn.Module], optim.Optimizer] = sgd,
    **options: Any,
) -> Tensor:
    net = make_model()
    optimizer = DistributedOptimizer(inner(net), net, form(world, P), bsp(), bucket_cap_mb=1e-4, **options)
    body(net, optimizer, lambda t: loss(net, *batch(t, world.rank)).backward())
    return vector(net)


def assert_as_alone(
    run: Callable,
    P: int,
    K: int,
    body: Body,
    inner: Callable[[nn.Module], optim.Optimizer] = sgd,
    **options: Any,
) -> None:
    expected = alone(P * K, body, inner)
    for w in run(P * K, lambda world: on_ranks(world, P, body, inner, **options)):
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-11)


def ordinary(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        backward(t)
        optimizer.step()


def clipping(of: optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([x for group in of.param_groups for x in group["params"]], 0.05)


def to_norm_1(of: optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for x in (x for group in of.param_groups for x in group["params"]):
            x.div_(x.norm())


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_hooks_that_the_wrapped_optimizer_had_see_the_whole(run, P: int, K: int) -> None:
    def inner(net: nn.Module) -> optim.Optimizer:
        made = sgd(net)
        made.register_step_pre_hook(clipping)
        made.register_step_post_hook(to_norm_1)
        return made

    assert_as_alone(run, P, K, ordinary, inner)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_hooks_of_all_optimizers_see_the_whole_once(run, P: int, K: int) -> None:
    handles = register_optimizer_step_pre_hook(clipping), register_optimizer_step_post_hook(to_norm_1)
    try:
        assert_as_alone(run, P, K, ordinary)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.ranks(2)
def test_hooks_of_what_an_optimizer_has_inside_are_refused(run) -> None:
    def train(world: Communicator) -> None:
        net = make_model()
        params = list(net.parameters())
        parts = optim.SGD(params[:2], lr=0.1), optim.AdamW(params[2:], lr=0.1)
        optimizer = DistributedOptimizer(hpcsgd.ChainedOptimizer(*parts), net, form(world), bsp())
        parts[1].register_step_post_hook(to_norm_1)
        loss(net, *batch(0, world.rank)).backward()
        optimizer.step()

    with pytest.raises(
        UserError, match=r"hook around .* inside SGD and AdamW, .* on the DistributedOptimizer"
    ):
        run(2, train)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_a_step_that_was_patched_sees_the_whole(run, P: int, K: int) -> None:
    def inner(net: nn.Module) -> optim.Optimizer:
        made = sgd(net)
        step = made.step

        def patched(closure: Any = None) -> Any:
            clipping(made)
            return step(closure)

        vars(made)["step"] = patched
        return made

    assert_as_alone(run, P, K, ordinary, inner)


@pytest.mark.ranks(2)
def test_a_scheduler_of_the_wrapped_optimizer_knows_that_it_stepped(run) -> None:
    def train(world: Communicator) -> list[float]:
        net = make_model()
        inner = sgd(net)
        scheduler = optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = DistributedOptimizer(inner, net, form(world), bsp())
        ordinary(net, optimizer, lambda t: loss(net, *batch(t, world.rank)).backward())
        scheduler.step()  # warnings are errors in tests
        return [float(rate) for rate in scheduler.get_last_lr()]

    assert run(2, train) == [[0.05]] * 2


LOOKUPS: dict[str, Callable[[Any, Any], object]] = {
    "in": lambda state, p: "momentum_buffer" in state[p],
    "item": lambda state, p: state[p]["momentum_buffer"],
    "get": lambda state, p: state.get(p)["momentum_buffer"],
    "get of it": lambda state, p: state[p].get("momentum_buffer"),
    "items": lambda state, p: list(state[p].items()),
    "len": lambda state, p: len(state[p]),
    "pop": lambda state, p: state.pop(p, None),
    "set": lambda state, p: state.__setitem__(p, {}),
    "set of it": lambda state, p: state[p].__setitem__("momentum_buffer", 0),
    "delete": lambda state, p: state.__delitem__(p),
    "clear": lambda state, p: state[p].clear(),
    "default of it": lambda state, p: state[p].setdefault("momentum_buffer", 0),
    "update": lambda state, p: state.update({p: {}}),
    "update of it": lambda state, p: state[p].update(momentum_buffer=0),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", LOOKUPS)
def test_state_is_not_looked_up_by_parameter_where_it_is_divided(run, name: str) -> None:
    def train(world: Communicator) -> None:
        def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
            for param in net.parameters():
                assert param not in optimizer.state
                assert optimizer.state.get(param) is None
            ordinary(net, optimizer, backward)
            for param in net.parameters():
                LOOKUPS[name](optimizer.state, param)

        on_ranks(world, 1, body)

    with pytest.raises(
        UserError, match=r"^(rank \d: )?momentum_buffer in optimizer.state was looked up .* by parameter"
    ):
        run(2, train)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_all_state_may_be_emptied_and_others_keep_theirs(run, P: int, K: int) -> None:
    def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        ordinary(net, optimizer, backward)
        for param in net.parameters():
            optimizer.state[param]["theirs"] = 1
            assert optimizer.state[param]["theirs"] == 1
            assert "others" not in optimizer.state[param]
        copy.deepcopy(list(optimizer.state.values()))
        optimizer.state.clear()
        ordinary(net, optimizer, backward)

    assert_as_alone(run, P, K, body)


OPTIONS = {"weight_decay": 0.3, "momentum": 0.5, "nesterov": True}


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_one_rank_alone_is_reported(run, P: int, K: int, name: str) -> None:
    def train(world: Communicator) -> None:
        def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
            ordinary(net, optimizer, backward)
            optimizer.param_groups[0][name] = OPTIONS[name] if world.rank else optimizer.param_groups[0][name]
            ordinary(net, optimizer, backward)

        on_ranks(world, P, body)

    with pytest.raises(
        UserError, match=r"an option of param_groups, .* differs between rank 0 and rank 1 in step 4"
    ):
        run(2, train)


@pytest.mark.ranks(2)
def test_an_option_that_is_a_tensor_is_compared_by_value(run) -> None:
    def train(world: Communicator) -> None:
        def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
            ordinary(net, optimizer, backward)
            optimizer.param_groups[0]["momentum"] = torch.tensor(0.5 + 0.1 * world.rank)
            ordinary(net, optimizer, backward)

        on_ranks(world, 1, body)

    with pytest.raises(UserError, match="differs between rank 0 and rank 1 in step 4"):
        run(2, train)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_options_may_change_on_all_ranks(run, P: int, K: int) -> None:
    def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        ordinary(net, optimizer, backward)
        optimizer.param_groups[0].update(OPTIONS)
        ordinary(net, optimizer, backward)

    assert_as_alone(run, P, K, body)


class Tied(nn.Module):
    """A model with two layers, of which `tie` makes the second one from the memory of the first."""

    def __init__(self, tie: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        tie(self.a, self.b)


def on_one_rank(optimizer: optim.Optimizer, net: nn.Module) -> None:
    threads.run(1, lambda world: DistributedOptimizer(optimizer, net, form(world), bsp()))


def by_data(a: nn.Linear, b: nn.Linear) -> None:
    b.weight.data = a.weight.data


def transposed(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.t())


def frozen(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = nn.Parameter(a.weight.detach()[1:], requires_grad=False)


def buffer(a: nn.Linear, b: nn.Linear) -> None:
    b.register_buffer("seen", a.weight.detach())


def by_one_element(a: nn.Linear, b: nn.Linear) -> None:
    memory = torch.randn(17)
    a.weight, b.weight = (nn.Parameter(memory[8 * i : 8 * i + 9].view(3, 3)) for i in range(2))


@pytest.mark.parametrize("tie", [by_data, transposed, frozen, buffer, by_one_element])
def test_memory_shared_with_a_trained_parameter_is_refused(
    tie: Callable[[nn.Linear, nn.Linear], None],
) -> None:
    net = Tied(tie)
    with pytest.raises(
        JobError, match=r"a.weight and b.\w+ share memory, .*: to tie two parameters assign one"
    ):
        on_one_rank(sgd(net), net)


def same_parameter(a: nn.Linear, b: nn.Linear) -> None:
    b.weight = a.weight


def both_frozen(a: nn.Linear, b: nn.Linear) -> None:
    a.weight.requires_grad_(False)
    b.weight = nn.Parameter(a.weight.detach(), requires_grad=False)


def side_by_side(a: nn.Linear, b: nn.Linear) -> None:
    memory = torch.randn(18)
    a.weight, b.weight = (nn.Parameter(memory[9 * i : 9 * i + 9].view(3, 3)) for i in range(2))


@pytest.mark.parametrize("tie", [same_parameter, both_frozen, side_by_side])
def test_other_memory_may_be_shared(tie: Callable[[nn.Linear, nn.Linear], None]) -> None:
    net = Tied(tie)
    on_one_rank(sgd(net), net)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_scale_rows_in_a_forward_pass_are_refused(run, kind: type) -> None:
    def train(world: Communicator) -> None:
        net = nn.Sequential(kind(4, 3, max_norm=1.0))
        DistributedOptimizer(sgd(net), net, form(world), bsp())

    with pytest.raises(
        JobError, match=r"0 has max_norm = 1, .* weight.data.renorm_\(2, 0, 1\) after step\(\)"
    ):
        run(2, train)


def parts(net: Any, x: Tensor, rank: int) -> Tensor:
    """Return the output; rank 1 computes it without the first layers."""
    return net(x) if rank == 0 else net[3](x.new_ones(len(x), 7))


@pytest.mark.parametrize(("P", "K"), [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("how", ["norm", "value", "total"])
def test_a_layer_that_one_rank_does_not_use_is_clipped_everywhere(
    run, P: int, K: int, overlap: bool, how: str
) -> None:
    def change(net: nn.Module) -> None:
        params = list(net.parameters())
        if how == "norm":
            nn.utils.clip_grad_norm_(params, 0.05)
        elif how == "value":
            nn.utils.clip_grad_value_(params, 0.01)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            nn.utils.clip_grads_with_norm_(params, 0.05, norm)

    def of(net: nn.Module, t: int, rank: int) -> Tensor:
        x, y = batch(t, rank)
        return nn.functional.cross_entropy(parts(net, x, rank), y)

    plain = make_model()
    optimizer = sgd(plain)
    for t in range(STEPS):
        optimizer.zero_grad()
        torch.stack([of(plain, t, rank) for rank in range(P * K)]).mean().backward()
        change(plain)
        optimizer.step()

    def train(world: Communicator) -> Tensor:
        net = make_model()
        made = DistributedOptimizer(
            sgd(net), net, form(world, P), bsp(), overlap_grad_reduce=overlap, bucket_cap_mb=1e-4
        )
        for t in range(STEPS):
            made.zero_grad()
            of(net, t, world.rank).backward()
            change(net)
            made.step()
        return vector(net)

    for w in run(P * K, train):
        torch.testing.assert_close(w, vector(plain), rtol=0, atol=1e-11)


@pytest.mark.ranks(2)
def test_a_layer_is_clipped_everywhere_after_a_backward_pass_that_failed(run) -> None:
    """A backward pass may fail, for example for lack of memory, and the loop goes on with the next batch."""

    def out_of_memory(gradient: Tensor) -> None:
        raise MemoryError

    def train(world: Communicator) -> Tensor:
        net: Any = make_model()
        optimizer = DistributedOptimizer(sgd(net), net, form(world, 2), bsp(), overlap_grad_reduce=False)
        x, y = batch(0, world.rank)
        hidden = net[:2](x)
        hidden.register_hook(out_of_memory)
        with pytest.raises(MemoryError):
            nn.functional.cross_entropy(net[2:](hidden), y).backward()
        optimizer.zero_grad()
        nn.functional.cross_entropy(parts(net, x, world.rank), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        return vector(net)

    one, other = run(2, train)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_whole_gradients_of_the_last_step_are_changed_and_used_again(run, P: int, K: int) -> None:
    """The changed gradients are used: a step without its own backward pass updates by what is there."""

    def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        for t in range(STEPS):
            optimizer.zero_grad()
            backward(t)
            optimizer.step()
            for param in net.parameters():
                param.grad.mul_(0.5)
            optimizer.step()

    assert_as_alone(run, P, K, body)


@pytest.mark.ranks(2)
def test_gradients_that_nobody_has_are_none_after_zeroing_the_others(run) -> None:
    def train(world: Communicator) -> list[bool]:
        net: Any = make_model()
        optimizer = DistributedOptimizer(sgd(net), net, form(world, 1), bsp())
        nn.functional.cross_entropy(parts(net, batch(0, 1)[0], 1), batch(0, 1)[1]).backward()
        optimizer.zero_grad(set_to_none=False)
        return [param.grad is None for param in net.parameters()]

    unused = [not name.startswith("3") for name, _ in make_model().named_parameters()]
    assert True in unused
    assert False in unused
    assert run(2, train) == [unused] * 2


@pytest.mark.parametrize(("P", "K"), SHAPES)
@pytest.mark.parametrize(
    "change", [clipping, lambda optimizer: optimizer.param_groups[0]["params"][0].grad.mul_(2)]
)
def test_gradients_are_used_in_the_middle_of_a_window(run, P: int, K: int, change: Callable) -> None:
    def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        for t in range(STEPS):
            optimizer.zero_grad()
            for window in range(3):
                backward(10 * t + window)
                if window < 2:
                    change(optimizer)
            optimizer.step()

    assert_as_alone(run, P, K, body, gradient_accumulation_steps=3)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward")  # about the reference cycle
@pytest.mark.parametrize("how", ["penalty", "second derivatives"])
def test_gradients_whose_graph_is_lost_are_not_used(run, how: str) -> None:
    def train(world: Communicator) -> None:
        net = make_model()
        DistributedOptimizer(sgd(net), net, form(world), bsp())
        loss(net, *batch(0, world.rank)).backward(create_graph=True)
        if how == "penalty":
            torch.stack(
                [p.grad.square().sum() for p in net.parameters() if p.grad is not None]
            ).sum().backward()
        else:
            torch.autograd.grad(
                [p.grad for p in net.parameters() if p.grad is not None], list(net.parameters())
            )

    with pytest.raises(
        UserError, match="averaged gradients have no graph: compute what you differentiate by"
    ):
        run(2, train)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_backward_pass_after_clipping(run, overlap: bool) -> None:
    def body(net: Any, optimizer: Any, backward: Callable[[int], None], synchronized: bool) -> None:
        for t in range(STEPS):
            optimizer.zero_grad()
            backward(t)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.clip_grad_norm_(0.05)
                if synchronized:
                    optimizer.synchronize()
            else:
                clipping(optimizer)
            backward(t + 100)
            optimizer.step()

    assert_as_alone(run, 1, 2, functools.partial(body, synchronized=True), overlap_grad_reduce=overlap)
    assert_as_alone(run, 2, 1, functools.partial(body, synchronized=False), overlap_grad_reduce=overlap)
    with pytest.raises(
        UserError, match=r"averaged and clipped, .* optimizer.synchronize\(\) before a further"
    ):
        run(
            2,
            lambda world: on_ranks(
                world, 1, functools.partial(body, synchronized=False), overlap_grad_reduce=overlap
            ),
        )


@pytest.mark.parametrize(("P", "K"), SHAPES)
def test_a_dropped_gradient_counts_in_no_norm(run, P: int, K: int) -> None:
    def body(net: Any, optimizer: Any, backward: Callable[[int], None]) -> None:
        for t in range(STEPS):
            optimizer.zero_grad()
            backward(t)
            net[3].weight.grad = None
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.clip_grad_norm_(0.05)
            else:
                clipping(optimizer)
            optimizer.step()

    assert_as_alone(run, P, K, body)


@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 1)])
def test_gradients_are_copied_and_saved(run, P: int, K: int, tmp_path: Any) -> None:
    def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        optimizer.zero_grad()
        backward(0)
        copied = copy.deepcopy([p.grad for p in net.parameters()])
        for p, grad in zip(net.parameters(), copied, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=0)
            p.grad = 2 * grad
        optimizer.step()

    assert_as_alone(run, P, K, body)


@pytest.mark.ranks(2)
def test_a_kept_gradient_that_was_never_averaged_is_refused(run) -> None:
    def body(net: Any, optimizer: optim.Optimizer, backward: Callable[[int], None]) -> None:
        backward(0)
        kept = net[0].weight.grad
        optimizer.step()
        optimizer.zero_grad()
        backward(1)
        kept.norm()

    with pytest.raises(
        UserError, match=r"a gradient of 0.weight was kept, and used for the first time after"
    ):
        run(2, lambda world: on_ranks(world, 1, body))


@pytest.mark.ranks(2)
def test_a_collective_of_the_loop_is_no_matter_of_the_gradients(run) -> None:
    """Rank 1 lacks gradients of the first layers and has sent less when it computes the mean."""

    def train(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world), make_model()
        optimizer = DistributedOptimizer(sgd(net), net, topology, bsp(), bucket_cap_mb=1e-4)
        x, y = batch(0, world.rank)
        nn.functional.cross_entropy(parts(net, x, world.rank), y).backward()
        mean = torch.tensor([float(world.rank)])
        topology.intra_group.allreduce(mean, "mean").wait()
        topology.world.allreduce(mean, "sum").wait()
        optimizer.step()
        return mean, vector(net)

    plain = make_model()
    losses = [nn.functional.cross_entropy(parts(plain, batch(0, r)[0], r), batch(0, r)[1]) for r in range(2)]
    torch.stack(losses).mean().backward()
    sgd(plain).step()
    for mean, w in run(2, train):
        assert mean.item() == 1
        torch.testing.assert_close(w, vector(plain), rtol=0, atol=1e-11)


METHODS: dict[str, Callable[[], Any]] = {
    "sasgd": lambda: hpcsgd.sasgd(sync_every=4),
    **{name: partial(make, 4) for name, make in OF_INTERVALS.items()},
    "ssp": lambda: hpcsgd.ssp(max_staleness=2),
}


@pytest.mark.parametrize(("P", "K"), [(2, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("name", METHODS)
def test_groups_synchronize_before_the_first_step_and_alone(run, P: int, K: int, name: str) -> None:
    def train(world: Communicator) -> Tensor:
        net = make_model()
        made = DistributedOptimizer(optim.SGD(net.parameters(), 0.1), net, form(world, P), METHODS[name]())
        made.average_models()
        start = vector(net)
        for t in range(2):
            made.zero_grad()
            loss(net, *batch(t, world.rank)).backward()
            made.step()
        made.average_models()
        return start

    for w in run(P * K, train):
        if name != "ssp":  # a later group gets the changes of the others
            torch.testing.assert_close(w, vector(make_model()), rtol=0, atol=1e-12)


def test_what_only_looks_like_an_optimizer_goes_outside() -> None:
    class Look(optim.Optimizer):
        def __init__(self, inner: optim.Optimizer) -> None:
            self.inner, self.param_groups = inner, inner.param_groups

    net = make_model()
    with pytest.raises(
        JobError, match=r"Look does not call .*__init__: put it around one, Look\(Distributed"
    ):
        on_one_rank(Look(sgd(net)), net)
