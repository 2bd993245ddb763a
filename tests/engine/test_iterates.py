"""Groups average both iterates of optimizers that train at a point between two, and evaluate their mean."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd import DistributedOptimizer
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import Topology, form
from hpcsgd.core.traffic import ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.traffic import of_step
from hpcsgd.engine.dividing import update_of
from hpcsgd.engine.iterates import in_train_mode, with_modes
from hpcsgd.engine.plan import StepPlan
from hpcsgd.errors import UserError
from hpcsgd.train.training_profile import state_of
from references import batch, loss, model, vector
from special_optimizers import Gpa, ScheduleFree

STEPS, EVERY = 5, 2
SHAPES = pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1)])
Make = Callable[[Any], optim.Optimizer]


def of_package(name: str, **options: Any) -> Make:
    def make(params: Any) -> optim.Optimizer:
        package = pytest.importorskip("schedulefree")
        return getattr(package, name)(params, **options)

    return make


MAKE: dict[str, Make] = {
    "AdamWScheduleFree": of_package("AdamWScheduleFree", lr=0.05, weight_decay=0.01, warmup_steps=3),
    "SGDScheduleFree": of_package("SGDScheduleFree", lr=0.3, weight_decay=0.01, foreach=False),
    "RAdamScheduleFree": of_package("RAdamScheduleFree", lr=0.05),
    "like it": ScheduleFree,
    "Gpa": Gpa,
}
OPTIMIZERS = pytest.mark.parametrize("kind", MAKE)


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups with different rates, in another order than the model's."""
    params = list(net.parameters())
    return [{"params": params[1::2], "lr": 0.02}, {"params": params[0::2]}]


class Run:
    """The training of one rank."""

    def __init__(self, world: Communicator, P: int, kind: str, method: Any = None, **options: Any) -> None:
        self.topology, self.net = form(world, P), model(world.rank)
        self.inner = MAKE[kind](groups_of(self.net))
        method = method or hpcsgd.hierarchical(EVERY)
        self.optimizer: Any = DistributedOptimizer(self.inner, self.net, self.topology, method, **options)

    def steps(self, first: int, last: int) -> None:
        for t in range(first, last):
            self.optimizer.zero_grad()
            value = loss(self.net, *batch(t, self.topology.rank))
            value.backward()
            self.optimizer.step(loss=value)


def by_hand(P: int, K: int, kind: str, steps: int, together: tuple[str, ...] = ("z",)) -> list[Any]:
    """Train each group in one process with the optimizer's own code.

    Every second step the parameters y and the states in `together` are averaged.
    """
    nets = [model() for _ in range(P)]
    optimizers: list[Any] = [MAKE[kind](groups_of(net)) for net in nets]
    for t in range(steps):
        for g, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.train()
            optimizer.zero_grad()
            ranks = range(g * K, (g + 1) * K)
            torch.stack([loss(net, *batch(t, rank)) for rank in ranks]).mean().backward()
            optimizer.step()
        if (t + 1) % EVERY == 0:
            of_groups = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
            for params in zip(*of_groups, strict=True):
                states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
                for tensors in [params, *([s[name] for s in states] for name in together)]:
                    mean = torch.stack([x.detach() for x in tensors]).mean(0)
                    for x in tensors:
                        x.data.copy_(mean)
    return list(zip(nets, optimizers, strict=True))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


WAYS = pytest.mark.parametrize("options", [{}, {"elementwise": True}], ids=["whole", "cut"])


@SHAPES
@OPTIMIZERS
@WAYS
def test_groups_average_both_iterates(run, P: int, K: int, kind: str, options: dict[str, Any]) -> None:
    if kind == "Gpa" and options and K > 1:
        with pytest.raises(UserError, match="Gpa keeps train_mode and other numbers in the state of the fi"):
            run(P * K, lambda world: Run(world, P, kind, **options))
        return
    expected = by_hand(P, K, kind, STEPS)
    y = [vector(net) for net, _ in expected]
    for _, optimizer in expected:
        optimizer.eval()
    x = [vector(net) for net, _ in expected]
    mean = torch.stack(x).mean(0)

    def body(world: Communicator) -> tuple[Tensor, ...]:
        r = Run(world, P, kind, **options)
        r.optimizer.train()
        r.steps(0, STEPS)
        of_y = vector(r.net)
        with r.optimizer.averaged_model():
            averaged = vector(r.net)
            assert in_train_mode(r.inner) is False
        assert torch.equal(vector(r.net), of_y)
        assert in_train_mode(r.inner)
        r.optimizer.eval()
        return of_y, vector(r.net), averaged

    for rank, (of_y, of_x, averaged) in enumerate(run(P * K, body)):
        close(of_y, y[rank // K])
        close(of_x, x[rank // K])
        close(averaged, mean)


@SHAPES
@OPTIMIZERS
@pytest.mark.parametrize("training", [True, False])
def test_modes_that_the_block_has_set_may_be_asked_for_in_it(
    run, P: int, K: int, kind: str, training: bool
) -> None:
    """Evaluation loops of libraries call `eval()`, and some `train()`, inside the block."""

    def body(world: Communicator) -> None:
        r = Run(world, P, kind)
        r.optimizer.train()
        r.steps(0, 3)
        if not training:
            r.optimizer.eval()
        before = vector(r.net)
        with r.optimizer.averaged_model():
            averaged = vector(r.net)
            r.optimizer.eval()
            if training:
                r.optimizer.train()
            else:
                with pytest.raises(UserError, match=r"train\(\) inside averaged_model\(\)"):
                    r.optimizer.train()
            assert torch.equal(vector(r.net), averaged)
        assert torch.equal(vector(r.net), before)
        assert bool(in_train_mode(r.inner)) is training
        r.optimizer.train()
        r.steps(3, 5)

    run(P * K, body)


@SHAPES
@OPTIMIZERS
def test_after_a_synchronization_groups_evaluate_one_model(run, P: int, K: int, kind: str) -> None:
    def body(world: Communicator) -> tuple[Tensor, float]:
        r = Run(world, P, kind)
        r.optimizer.train()
        r.steps(0, 2 * EVERY)
        r.optimizer.eval()
        with r.optimizer.averaged_model() as D:
            pass
        return vector(r.net), D

    found = run(P * K, body)
    for x, D in found:
        close(x, found[0][0])
        assert D < 1e-14


@SHAPES
@OPTIMIZERS
@pytest.mark.parametrize("master", [None, torch.float32])
def test_train_returns_to_the_bits_before_eval(run, P: int, K: int, kind: str, master: Any) -> None:
    def body(world: Communicator) -> None:
        topology, net = form(world, P), model(dtype=torch.bfloat16 if master else torch.float32)
        inner = MAKE[kind](groups_of(net))
        method = hpcsgd.hierarchical(EVERY)
        optimizer: Any = DistributedOptimizer(inner, net, topology, method, master_dtype=master)
        plain = copy.deepcopy(net)
        optimizer.train()
        dtype = torch.bfloat16 if master else torch.float32
        for t in range(7):  # RAdam's first steps have a rate of 0
            optimizer.zero_grad()
            loss(net, *batch(t, topology.rank, dtype=dtype)).backward()
            optimizer.step()
        y, state = vector(net), copy.deepcopy(optimizer.state_dict()["state"])
        for _ in range(2):
            optimizer.eval()
            assert not torch.equal(vector(net), y)
            optimizer.eval()
            optimizer.train()
            assert torch.equal(vector(net), y)
            optimizer.train()
            assert torch.equal(vector(net), y)
        after = optimizer.state_dict()["state"]
        assert after.keys() == state.keys()
        for i, values in state.items():
            assert values.keys() == after[i].keys()
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[i][name])), name
                assert master is None or not value.dim() or value.dtype == master
        assert not torch.equal(vector(plain), y)

    run(P * K, body)


@SHAPES
@OPTIMIZERS
def test_train_keeps_what_changed_the_parameters_in_eval_mode(run, P: int, K: int, kind: str) -> None:
    """A mean over groups in eval mode is kept; `train()` computes y from it, as the optimizer itself does."""

    def body(world: Communicator) -> tuple[Tensor, Tensor]:
        r = Run(world, P, kind, hpcsgd.hierarchical(100))
        r.optimizer.train()
        r.steps(0, 3)
        r.optimizer.eval()
        r.optimizer.average_models()
        x = vector(r.net)
        r.optimizer.train()
        y = vector(r.net)
        r.optimizer.eval()
        close(vector(r.net), x)
        return x, y

    found = run(P * K, body)
    for x, y in found:
        close(x, found[0][0])
        close(y, found[0][1])


@SHAPES
@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "like it"])
def test_a_step_in_eval_mode_raises_as_the_package_does_and_changes_nothing(
    run, P: int, K: int, kind: str
) -> None:
    def body(world: Communicator) -> tuple[Tensor, Tensor]:
        found = []
        for attempts in (False, True):
            r = Run(world, P, kind)
            r.optimizer.train()
            r.steps(0, 1)
            if attempts:
                r.optimizer.eval()
                loss(r.net, *batch(9, r.topology.rank)).backward()
                with pytest.raises(Exception, match=r"train mode|train\(\)") as raised:
                    r.optimizer.step()
                assert type(raised.value) is not UserError
                r.optimizer.zero_grad()
                r.optimizer.train()
            assert r.optimizer.t == 1
            r.steps(1, 4)
            found.append(vector(r.net))
        return found[0], found[1]

    for without, after in run(P * K, body):
        assert torch.equal(without, after)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("options", [{}, {"elementwise": True}], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "like it"])
@pytest.mark.parametrize("now", [(2, 2), (3, 1), (1, 3), (1, 4)])
def test_checkpoints_keep_the_mode_and_both_iterates(
    run, tmp_path: Path, now: tuple[int, int], kind: str, options: dict[str, Any], mode: str
) -> None:
    """On the same ranks both iterates have the same bits.

    Other numbers of ranks start from the means over the groups.
    """
    (P, K), (P2, K2) = (2, 2), now

    def saved(world: Communicator) -> tuple[Tensor, Tensor]:
        r = Run(world, P, kind, **options)
        r.optimizer.train()
        r.steps(0, 2 * EVERY)
        if mode == "eval":
            r.optimizer.eval()
        hpcsgd.save(tmp_path, r.optimizer)
        shown = vector(r.net)
        r.optimizer.train()
        return shown, vector(r.net)

    def loaded(world: Communicator) -> tuple[Any, ...]:
        before = world.gather_objects(threads.run(P * K, saved) if world.rank == 0 else None)[0]
        r = Run(world, P2, kind, **options)
        hpcsgd.load(tmp_path, r.optimizer)
        assert r.optimizer.t == 2 * EVERY
        assert in_train_mode(r.inner) is (mode == "train")
        shown = vector(r.net)
        r.optimizer.train()
        y = vector(r.net)
        r.optimizer.eval()
        return before, shown, y, vector(r.net)

    for rank, (before, shown, y, x) in enumerate(run(P2 * K2, loaded)):
        same = before[rank if now == (P, K) else 0]
        close(shown, same[0])
        close(y, same[1])
        if now == (P, K):
            assert torch.equal(shown, same[0])
            assert torch.equal(y, same[1])
        if mode == "eval":
            close(x, shown)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_other_groups_start_from_both_means_of_a_parameter_that_one_had_updated(
    run, tmp_path: Path, mode: str
) -> None:
    """A group that has not updated it has no raw iterate; there it is the parameter."""

    def updated(topology: Topology) -> tuple[nn.Module, Any]:
        net = model()
        inner = Gpa(net.parameters())
        optimizer: Any = DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(9))
        return net, optimizer

    def saved(world: Communicator) -> tuple[Tensor, Tensor]:
        topology = form(world, 2)
        net, optimizer = updated(topology)
        optimizer.train()
        first, *others = net.parameters()
        value = loss(net, *batch(0, topology.rank))
        value.backward(inputs=others if topology.group_index else [first, *others])
        optimizer.step()
        y = first.detach().clone()
        optimizer.eval()
        x = first.detach().clone()
        if mode == "train":
            optimizer.train()
        hpcsgd.save(tmp_path, optimizer)
        return y, x

    def loaded(world: Communicator) -> tuple[Any, Tensor, Tensor]:
        before = threads.run(2, saved)
        net, optimizer = updated(form(world, 1))
        hpcsgd.load(tmp_path, optimizer)
        optimizer.train()
        y = next(net.parameters()).detach().clone()
        optimizer.eval()
        return before, y, next(net.parameters()).detach().clone()

    ((before, y, x),) = run(1, loaded)
    close(y, (before[0][0] + before[1][0]) / 2)
    close(x, (before[0][1] + before[1][1]) / 2)


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "Gpa"])
@pytest.mark.ranks(4)
def test_a_restart_continues_to_the_same_bits(run, tmp_path: Path, kind: str) -> None:
    def body(world: Communicator) -> tuple[Tensor, Tensor]:
        straight = Run(world, 2, kind)
        straight.optimizer.train()
        straight.steps(0, 3)
        straight.optimizer.eval()
        hpcsgd.save(tmp_path, straight.optimizer)
        straight.optimizer.train()
        straight.steps(3, 6)
        again = Run(world, 2, kind)
        hpcsgd.load(tmp_path, again.optimizer)
        again.optimizer.train()
        again.steps(3, 6)
        return vector(straight.net), vector(again.net)

    for straight, again in run(4, body):
        assert torch.equal(straight, again)


@pytest.mark.ranks(3)
def test_a_parameter_that_only_some_groups_update_has_its_value_as_raw_iterate(run) -> None:
    """A group that never had a gradient for the parameter contributes its value to the mean, not zero.

    The parameter is the optimizer's first one, under which the optimizer also keeps its numbers.
    """

    def body(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world, 3), model()
        inner = Gpa(net.parameters())
        optimizer: Any = DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(1))
        optimizer.train()
        first = next(net.parameters())
        start = first.detach().clone()
        value = loss(net, *batch(0, topology.rank))
        others = [p for p in net.parameters() if p is not first or topology.rank == 0]
        value.backward(inputs=others)
        optimizer.step()
        return start, inner.state[first]["z"].clone()

    found = run(3, body)
    plain = model()
    inner = Gpa(plain.parameters())
    inner.train()
    loss(plain, *batch(0, 0)).backward()
    inner.step()
    moved = inner.state[next(plain.parameters())]["z"]
    for start, z in found:
        close(z, (moved + 2 * start) / 3)


@SHAPES
def test_average_state_averages_it_once(run, P: int, K: int) -> None:
    def body(world: Communicator) -> tuple[Tensor, float]:
        sent = []
        for state in (hpcsgd.AverageState, hpcsgd.keep_state):
            r = Run(world, P, "like it", hpcsgd.hierarchical(EVERY, optimizer_state=state))
            before = world.stats.totals()
            r.optimizer.train()
            r.steps(0, STEPS)
            sent.append(world.stats.since(before)["state_average"].bytes)
        assert sent[0] == sent[1]
        return vector(r.net), sent[0]

    expected = by_hand(P, K, "like it", STEPS)
    for rank, (y, nbytes) in enumerate(run(P * K, body)):
        close(y, vector(expected[rank // K][0]))
        assert nbytes > 0


REFUSED: dict[str, Callable[[], Any]] = {
    "diloco": lambda: hpcsgd.diloco(2),
    "sparseloco": lambda: hpcsgd.sparseloco(2, density=0.5),
    "sgp": hpcsgd.sgp,
    "delayed": lambda: hpcsgd.delayed(hpcsgd.hierarchical(2), 1),
    "streaming": lambda: hpcsgd.streaming(hpcsgd.hierarchical(4), num_fragments=2, sync_delay=1),
    "guarded": lambda: hpcsgd.hierarchical(2, guard=hpcsgd.PseudoGradientPenalty()),
    "switch to diloco": lambda: hpcsgd.switch(hpcsgd.bsp(), hpcsgd.diloco(2), at=2),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.ranks(2)
def test_methods_that_would_average_one_of_them_are_refused(run, name: str) -> None:
    def body(world: Communicator) -> None:
        Run(world, 2, "like it", REFUSED[name]())

    with pytest.raises(UserError, match="ScheduleFree trains at a point between two iterates"):
        run(2, body)


ALLOWED: dict[str, Callable[[], Any]] = {
    "bsp": hpcsgd.bsp,
    "des_loc": lambda: hpcsgd.des_loc(2),
    "adacomm": lambda: hpcsgd.adacomm(initial_sync_every=2, adapt_every=2),
    "selsync": lambda: hpcsgd.selsync(0.0),
    "switch": lambda: hpcsgd.switch(hpcsgd.bsp(), hpcsgd.hierarchical(2), at=2),
    "reset": lambda: hpcsgd.hierarchical(2, optimizer_state=hpcsgd.ResetState),
    "allreduce_local_sgd": lambda: hpcsgd.allreduce_local_sgd(2),
    "quantized": lambda: hpcsgd.hierarchical(2, quantize=hpcsgd.quantizers.bf16()),
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.ranks(4)
def test_groups_evaluate_one_model_after_a_synchronization_of_other_methods(run, name: str) -> None:
    def body(world: Communicator) -> Tensor:
        r = Run(world, 2, "AdamWScheduleFree", ALLOWED[name]())
        r.optimizer.train()
        r.steps(0, 4)
        r.optimizer.eval()
        return vector(r.net)

    found = run(4, body)
    for x in found:
        close(x, found[0])


@pytest.mark.ranks(2)
def test_with_one_group_any_method_is_allowed(run) -> None:
    def body(world: Communicator) -> Tensor:
        r = Run(world, 1, "like it", hpcsgd.diloco(2))
        r.optimizer.train()
        r.steps(0, 3)
        return vector(r.net)

    first, second = run(2, body)
    assert torch.equal(first, second)


class Unknown(ScheduleFree):
    """An optimizer with another name for the raw iterate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("raw", p.clone())


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.ranks(2)
def test_an_unknown_name_of_the_raw_iterate_is_refused(run, allowed: bool) -> None:
    def body(world: Communicator) -> None:
        net = model()
        state = hpcsgd.AverageState if allowed else hpcsgd.keep_state
        method = hpcsgd.hierarchical(2, optimizer_state=state)
        DistributedOptimizer(Unknown(net.parameters()), net, form(world, 2), method)

    if allowed:
        run(2, body)
        return
    with pytest.raises(UserError, match=r"no state called z.* its state is raw"):
        run(2, body)


@pytest.mark.ranks(2)
def test_a_raw_iterate_of_code_around_is_refused_where_groups_would_not_average_it(run) -> None:
    package = pytest.importorskip("schedulefree")

    def body(world: Communicator, P: int) -> None:
        topology, net = form(world, P), model()
        inner = optim.SGD(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(2))
        around = package.ScheduleFreeWrapper(optimizer)
        around.train()
        loss(net, *batch(0, topology.rank)).backward()
        around.step()

    run(2, body, 1)
    with pytest.raises(UserError, match=r"the state of SGD has z of code around .*AdamWScheduleFree"):
        run(2, body, 2)


@pytest.mark.ranks(2)
def test_optimizers_chained_with_others_change_modes_together(run) -> None:
    def body(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, net = form(world, 2), model()
        first, *others = net.parameters()
        inner = hpcsgd.ChainedOptimizer(ScheduleFree([first]), optim.SGD(others, lr=0.1, momentum=0.9))
        assert len(with_modes(inner)) == 1
        optimizer: Any = DistributedOptimizer(inner, net, topology, hpcsgd.hierarchical(2))
        optimizer.train()
        for t in range(2):
            optimizer.zero_grad()
            loss(net, *batch(t, topology.rank)).backward()
            optimizer.step()
        y = vector(net)
        optimizer.eval()
        x = vector(net)
        assert not torch.equal(x, y)
        optimizer.train()
        assert torch.equal(vector(net), y)
        return x, y

    (x0, y0), (x1, y1) = run(2, body)
    close(x1, x0)
    close(y1, y0)


@pytest.mark.parametrize(("P", "K"), [(2, 2), (3, 1), (1, 2)])
@WAYS
def test_what_the_iterate_sends_is_predicted(run, P: int, K: int, options: dict[str, Any]) -> None:
    every, steps, cap = 3, 6, 200.0

    def made() -> Any:
        return hpcsgd.hierarchical(every)

    def body(world: Communicator) -> float:
        r = Run(world, P, "like it", made(), bucket_cap_mb=cap / 1e6, **options)
        r.optimizer.train()
        r.steps(0, 1)
        before = world.stats.totals()
        r.steps(1, 1 + steps)
        counted = world.stats.since(before).get("state_average")
        return 0.0 if counted is None else counted.bytes / steps

    found = sum(run(P * K, body)) / (P * K)
    net = model()
    inner = MAKE["like it"](groups_of(net))
    plan = StepPlan.of(made(), update_of(inner, **options))
    m = ModelLayout.of(net.named_parameters(), P, K, cap, *state_of(inner))
    ops = [x for x in of_step(plan, m) if x.phase == "state_average"]
    predicted = sum(x.times * float(sent(x.operation, x.nbytes, m.ranks(x.over))) for x in ops)
    assert found == pytest.approx(predicted, rel=1e-12)
    assert (predicted > 0) == (P > 1)
