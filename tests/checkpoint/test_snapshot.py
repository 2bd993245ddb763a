"""A restored training has the saved bits on the same P × K, and the mean of the groups on others."""

from __future__ import annotations

import copy
import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from hpcsgd.checkpoint import Checkpoints, Saved, capture, restore, restore_newest
from hpcsgd.checkpoint.snapshot import _layout
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.methods import Method, bsp, switch
from hpcsgd.methods.sgp import PushSum, sgp
from hpcsgd.parts.grad_reduces import Quantized, ReduceScatter
from hpcsgd.parts.quantizers import int4
from shapes import some
from trainings import METHODS, OPTIMIZERS, PLAIN, WAITING_FOR_NOBODY, Net, Training, two_groups

SAVED, LAST = 4, 7


def save(training: Training, folder: Path) -> None:
    topology = training.optimizer.topology
    state = capture(training.optimizer, shared={"epoch": 3}, own={"rank": torch.tensor(topology.rank)})
    Checkpoints(folder, topology).write(training.t, state)


def load(training: Training, folder: Path) -> tuple[Any, Any]:
    saved = Checkpoints(folder, training.optimizer.topology).newest()
    assert saved is not None
    shared, own = restore(saved, training.optimizer)
    training.t = training.optimizer.t
    return shared, own


def saved_by(P: int, K: int, folder: Path, *arguments: Any, **options: Any) -> list[dict[str, Tensor]]:
    """Return the state that each rank held when P × K ranks (as threads) saved."""

    def one(world: Communicator) -> dict[str, Tensor]:
        training = Training(form(world, groups=P), *arguments, **options)
        training.steps(SAVED)
        save(training, folder)
        return training.everything()

    return threads.run(P * K, one)


def assert_same(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        assert value.dtype == expected[name].dtype, name
        assert value.isfinite().all(), name  # NaN does not compare equal to itself
        assert torch.equal(value, expected[name]), name


def check_goes_on(run: Any, folder: Path, P: int, K: int, *arguments: Any, **options: Any) -> None:
    def whole_and_resumed(world: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        topology = form(world, groups=P)
        whole = Training(topology, *arguments, **options)
        whole.steps(SAVED)
        whole.optimizer.param_groups[0]["lr"] *= 0.5  # as a learning-rate scheduler does
        save(whole, folder)
        whole.steps(LAST - SAVED)
        resumed = Training(topology, *arguments, seed=1, **options)
        shared, own = load(resumed, folder)
        assert (resumed.t, shared, own) == (SAVED, {"epoch": 3}, {"rank": torch.tensor(topology.rank)})
        resumed.steps(LAST - SAVED)
        for ours, theirs in zip(whole.optimizer.param_groups, resumed.optimizer.param_groups, strict=True):
            assert {**ours, "params": 0} == {**theirs, "params": 0}
        return whole.everything(), resumed.everything()

    for whole, resumed in run(P * K, whole_and_resumed):
        assert_same(resumed, whole)


def shapes_methods_and_optimizers() -> list[Any]:
    """Return every method with AdamW and every optimizer with local SGD.

    The mark `long` selects the other combinations, and most of those with one group.
    """

    def often(P: int, method: str, optimizer: str) -> bool:
        return method == "hierarchical" or (P > 1 and optimizer == "AdamW")

    return [
        pytest.param(P, K, method, name, marks=[] if often(P, method, name) else [pytest.mark.long])
        for P, K in [(1, 2), (2, 2)]
        for method in METHODS
        for name in OPTIMIZERS
    ]


@pytest.mark.threads(unless={"P": 2, "K": 2, "optimizer": "AdamW"})
@pytest.mark.parametrize(("P", "K", "method", "optimizer"), shapes_methods_and_optimizers())
def test_goes_on_bit_for_bit(run, tmp_path: Path, P: int, K: int, method: str, optimizer: str) -> None:
    check_goes_on(run, tmp_path, P, K, optimizer, method)


@pytest.mark.slow
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2)])
def test_gradient_reductions_that_take_turns_go_on(run, tmp_path: Path, P: int, K: int) -> None:
    """Ranks restore the exact values of their shards, which the others have only quantized."""

    def packed() -> Method:
        return bsp(Quantized(gradients=int4(), parameters=int4()))

    check_goes_on(run, tmp_path, P, K, "momentum", lambda: switch(packed(), packed(), at=99))


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize(("P", "K"), [(1, 2), (2, 2), (4, 1)])
def test_goes_on_with_plain_sgd(run, tmp_path: Path, P: int, K: int, method: str) -> None:
    check_goes_on(run, tmp_path, P, K, "plain", method)


@pytest.mark.slow
@pytest.mark.threads(unless={"P": 2, "K": 4, "optimizer": "whole tensors"})
@pytest.mark.parametrize(
    ("P", "K"),
    some([(1, 1), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (8, 1)], {(1, 1), (1, 4), (4, 1), (2, 4)}),
)
@pytest.mark.parametrize("optimizer", ["AdamW", "whole tensors"])
def test_goes_on_in_every_shape(run, tmp_path: Path, P: int, K: int, optimizer: str) -> None:
    check_goes_on(run, tmp_path, P, K, optimizer)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "options", [{"overlap_grad_reduce": False}, {"elementwise": False}, {"bucket_cap_mb": 25.0}]
)
def test_goes_on_with_every_option(run, tmp_path: Path, options: dict[str, Any]) -> None:
    check_goes_on(run, tmp_path, 2, 2, "AdamW", **options)


@pytest.mark.ranks(4)
def test_owners_of_whole_tensors_go_on(run, tmp_path: Path) -> None:
    """State of any shape is restored when each rank owns whole tensors."""
    check_goes_on(run, tmp_path, 2, 2, "whole tensors", tensorwise=True)


class Narrow(nn.Module):
    """A model whose parameters are in bfloat16 and float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(108, 3, dtype=torch.bfloat16)
        self.narrower = nn.Linear(108, 3, dtype=torch.float16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x.bfloat16()).float() + self.narrower(x.half()).float()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("method", ["hierarchical", "osgp", "diloco"])
def test_narrow_parameters_go_on(run, tmp_path: Path, method: str) -> None:
    check_goes_on(run, tmp_path, 2, 2, "momentum", method, make=Narrow)


@pytest.mark.parametrize("method", ["hierarchical", "diloco"])
@pytest.mark.parametrize(("P", "K"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_masters_go_on(run, tmp_path: Path, P: int, K: int, method: str) -> None:
    """Groups averaged just before saving: what the master weights must still take up is saved, too."""
    check_goes_on(run, tmp_path, P, K, "AdamW", method, make=Narrow, master_dtype=torch.float32)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("before", "now"), [((1, 2), (1, 4)), ((2, 2), (1, 4)), ((2, 2), (4, 1))])
def test_masters_come_to_other_shapes(run, tmp_path: Path, before: Any, now: Any) -> None:
    """They become the mean of the groups' master weights, not rounded to the parameters' dtype."""

    def resumed(world: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        saved = None
        if world.rank == 0:
            saved = saved_by(*before, tmp_path, "momentum", make=Narrow, master_dtype=torch.float32)
        saved = world.gather_objects(saved)[0]
        training = Training(
            form(world, groups=now[0]), "momentum", make=Narrow, master_dtype=torch.float32, seed=1
        )
        load(training, tmp_path)
        mine = training.everything()
        firsts = saved[:: before[1]]
        mean = {name: torch.stack([each[name].double() for each in firsts]).mean(0) for name in firsts[0]}
        names = [name for name in mean if name.endswith("master")]
        assert len(names) == 4
        return {n: mine[n] for n in names}, {n: mean[n].float() for n in names}

    for mine, expected in run(4, resumed):
        assert_same(mine, expected)


@pytest.mark.threads(unless={"before": (2, 2), "now": (4, 1)})
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("before", "now"), [((2, 2), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (2, 2))])
@pytest.mark.parametrize("method", [*WAITING_FOR_NOBODY, *PLAIN, "diloco", "osgp"])
def test_narrow_state_goes_on_everywhere(run, tmp_path: Path, method: str, before: Any, now: Any) -> None:
    """State that is kept in float32 is restored in float32, although the parameters have 16 bits."""

    def resumed(world: Communicator) -> bool:
        if world.rank == 0:
            saved_by(*before, tmp_path, "plain", method, make=Narrow)
        world.barrier()
        training = Training(form(world, groups=now[0]), "plain", method, make=Narrow, seed=1)
        load(training, tmp_path)
        training.steps(3)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.steps(2)
        with training.optimizer.averaged_model():
            return all(bool(p.isfinite().all()) for p in training.net.parameters())

    assert run(4, resumed) == [True] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("before", "now"), [(25.0, 1e-4), (1e-4, 25.0)])
@pytest.mark.parametrize("method", ["diloco", "hierarchical"])
def test_in_other_buckets(run, tmp_path: Path, method: str, before: float, now: float) -> None:
    """The restored state does not depend on the bucket size."""

    def resumed(world: Communicator) -> tuple[Tensor, Tensor]:
        topology, ends = form(world, groups=2), []
        saved = Training(topology, "plain", method, bucket_cap_mb=before)
        saved.steps(SAVED)
        save(saved, tmp_path)
        for size in (before, now):
            training = Training(topology, "plain", method, seed=1, bucket_cap_mb=size)
            load(training, tmp_path)
            training.steps(3)
            ends.append(torch.cat([p.detach().double().reshape(-1) for p in training.net.parameters()]))
        return ends[0], ends[1]

    for one, other in run(2, resumed):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


SHAPES = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 2), (2, 4), (4, 2)]


FROM_2_2 = [(shape, (2, 2), "AdamW") for shape in SHAPES]
TO_2_2 = [((2, 2), shape, "AdamW") for shape in SHAPES if shape != (2, 2)]
OTHER_STATES = [
    (now, before, name)
    for name in ("momentum", "ASGD", "muon")
    for now, before in [((4, 1), (2, 2)), ((1, 2), (2, 2)), ((1, 1), (2, 2)), ((2, 2), (1, 1))]
]
LONG = {((4, 2), (2, 2)), ((2, 2), (4, 2)), *(((1, 1), (2, 2), name) for name in ("momentum", "ASGD"))}


@pytest.mark.threads(unless={"before": (2, 2), "now": (4, 1)})
@pytest.mark.parametrize(
    ("now", "before", "optimizer"),
    [
        pytest.param(*way, marks=[pytest.mark.long] if LONG & {way, way[:2]} else [])
        for way in FROM_2_2 + TO_2_2 + OTHER_STATES
    ],
)
def test_on_another_shape(
    run, tmp_path: Path, before: tuple[int, int], now: tuple[int, int], optimizer: str
) -> None:
    """Each group has the saved group's values if P is the same, and otherwise the mean over the groups."""

    def restored(world: Communicator) -> tuple[Any, dict[str, Tensor]]:
        saved = saved_by(*before, tmp_path, optimizer) if world.rank == 0 else None
        saved = world.gather_objects(saved)[0]
        training = Training(form(world, groups=now[0]), optimizer, seed=1)
        shared, own = load(training, tmp_path)
        assert shared == {"epoch": 3}
        assert (own is None) == (before != now)
        return saved, training.everything()

    for rank, (saved, mine) in enumerate(run(now[0] * now[1], restored)):
        groups = [saved[g * before[1]] for g in range(before[0])]
        assert before[0] == 1 or not torch.equal(groups[0]["model.scale"], groups[1]["model.scale"])
        expected = groups[rank // now[1]] if before[0] == now[0] else mean(groups)
        buffers = [name for name in expected if "running" in name]
        statistics = mean(saved) if before != now else saved[rank]
        assert_close(mine, {**expected, **{name: statistics[name] for name in buffers}})


def mean(saved: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    means = {}
    for name, first in saved[0].items():
        values = torch.stack([one[name] for one in saved])
        means[name] = values.double().mean(0).to(first.dtype) if first.is_floating_point() else first
    return means


def assert_close(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert mine.keys() == expected.keys()
    for name, value in mine.items():
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        told = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(value, expected[name], rtol=2 * eps, atol=0, msg=told)


@pytest.mark.threads(unless={"now": (4, 1)})
@pytest.mark.parametrize(
    ("now", "before"), [((4, 1), (2, 2)), ((1, 4), (2, 2)), ((2, 2), (4, 1)), ((1, 2), (2, 1))]
)
@pytest.mark.parametrize("optimizer", ["AdamW", "muon", "whole tensors"])
def test_training_goes_on_elsewhere(run, tmp_path: Path, now: Any, before: Any, optimizer: str) -> None:
    """Training continues as it does from the same values in a plain state_dict."""

    def resumed(world: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if world.rank == 0:
            saved_by(*before, tmp_path, optimizer)
        world.barrier()
        topology = form(world, groups=now[0])
        first = Training(topology, optimizer)
        load(first, tmp_path)
        second = Training(topology, optimizer)
        second.net.load_state_dict(copy.deepcopy(first.net.state_dict()))
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        second.t = first.t
        for training in (first, second):
            training.steps(3)
        return first.everything(), second.everything()

    for first, second in run(now[0] * now[1], resumed):
        assert_same(first, second)


@pytest.mark.ranks(4)
def test_another_method_starts_from_the_mean(run, tmp_path: Path) -> None:
    """`bsp` never averages parameters: groups that start with different ones would stay different."""

    def restored(world: Communicator) -> tuple[Any, dict[str, Tensor]]:
        saved = world.gather_objects(saved_by(2, 2, tmp_path) if world.rank == 0 else None)[0]
        training = Training(form(world, groups=2), method="bsp")
        load(training, tmp_path)
        return saved, training.everything()

    for saved, mine in run(4, restored):
        expected = {n: v for n, v in mean([saved[0], saved[2]]).items() if "running" not in n}
        assert_close({n: v for n, v in mine.items() if "running" not in n}, expected)


@pytest.mark.parametrize(
    ("before", "now", "method", "differ"),
    [
        ((2, 2), (1, 4), "hierarchical", True),
        ((4, 1), (2, 2), "hierarchical", True),
        ((2, 2), (2, 1), "hierarchical", False),
        ((1, 2), (2, 1), "hierarchical", False),
        ((2, 2), (1, 4), "bsp", False),
    ],
)
def test_a_job_that_starts_from_the_mean_of_several_models_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: Any, now: Any, method: str, differ: bool
) -> None:
    caplog.set_level(logging.INFO)
    saved_by(*before, tmp_path, method=method)
    threads.run(
        now[0] * now[1], lambda world: load(Training(form(world, groups=now[0]), method=method), tmp_path)
    )
    lines = [r.getMessage() for r in caplog.records if "whose models differ" in r.getMessage()]
    line = f"the checkpoint has {before[0]} groups whose models differ: this job starts from their mean"
    assert lines == [line] * differ


def shared_with_others(training: Training) -> list[Tensor]:
    """Return the server's model, or the vectors that a group averages with others."""
    shards = training.optimizer.method.state_dict()["averager"].sharded
    return [x.clone() for vectors in shards.values() for x in vectors]


@pytest.mark.threads(unless={"P": 2, "K": 2})
@pytest.mark.parametrize(("P", "K"), some([(2, 1), (2, 2), (4, 1), (3, 2)], {(2, 2), (3, 2)}))
@pytest.mark.parametrize("method", WAITING_FOR_NOBODY)
def test_what_groups_share_without_synchronizing_goes_on(
    run, tmp_path: Path, method: str, P: int, K: int
) -> None:
    """Groups resume with the common model, without updates that some of them had not received yet.

    Groups that train locally between synchronizations resume with their own models.
    """

    def saved_and_restored(world: Communicator) -> tuple[Any, ...]:
        topology = form(world, groups=P)
        training = Training(topology, method=method)
        training.steps(3)
        save(training, tmp_path / "same")
        with training.optimizer.averaged_model():
            central = model_of(training)
        own = training.optimizer.method.averager.traits.local_models
        before = model_of(training) if own else central, shared_with_others(training)
        resumed = Training(topology, method=method, seed=1)
        load(resumed, tmp_path / "same")
        after = model_of(resumed), shared_with_others(resumed)
        resumed.steps(2)
        return before, after

    for (model, kept), (their_model, their_kept) in run(P * K, saved_and_restored):
        assert_same(their_model, model)
        assert kept
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, their_kept, strict=True))


def model_of(training: Training) -> dict[str, Tensor]:
    """Return copies of the model's parameters."""
    return {name: p.detach().clone() for name, p in training.net.named_parameters()}


def push_sum(training: Training) -> PushSum:
    how = training.optimizer.method.averager
    assert isinstance(how, PushSum)
    return how


@pytest.mark.parametrize(("P", "K"), [(2, 2), (2, 1), (1, 2), (4, 1)])
def test_weights_of_push_sum_go_on_with_their_groups(run, tmp_path: Path, P: int, K: int) -> None:
    """Weights are restored on the same P × K; otherwise all groups start with the weight 1."""

    def weighted(world: Communicator) -> None:
        training = Training(form(world, groups=2), method="sgp")
        push_sum(training).weight = 2.0 + training.optimizer.topology.group_index
        save(training, tmp_path)

    def restored(world: Communicator) -> float:
        if world.rank == 0:
            threads.run(4, weighted)
        world.barrier()
        training = Training(form(world, groups=P), method="sgp")
        load(training, tmp_path)
        return push_sum(training).weight

    expected = [2.0 + rank // K if (P, K) == (2, 2) else 1.0 for rank in range(P * K)]
    assert run(P * K, restored) == expected


@pytest.mark.ranks(4)
def test_what_was_a_groups_own_does_not_go_on_from_the_mean(run, tmp_path: Path) -> None:
    """With another gradient reduction all groups start from the mean, and the old weights no longer apply."""

    def restored(world: Communicator) -> float:
        topology = form(world, groups=2)
        training = Training(topology, method="sgp")
        push_sum(training).weight = 2.0 + topology.group_index
        save(training, tmp_path)
        other = Training(topology, method=lambda: sgp(grad_reduce=ReduceScatter()))
        load(other, tmp_path)
        return push_sum(other).weight

    assert run(4, restored) == [1.0] * 4


@pytest.mark.ranks(2)
def test_a_group_that_never_updated_a_parameter(run, tmp_path: Path) -> None:
    """The group has no optimizer state; the mean is that of the other group."""

    def rewritten(world: Communicator) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        topology = form(world, groups=2)
        training = Training(topology, "AdamW")
        training.steps(2)
        if topology.group_index == 0:
            training.optimizer.local.optimizer.state.clear()
        everything = world.gather_objects(training.everything())
        save(training, tmp_path)
        alone = Training(form(world, groups=1), "AdamW")
        load(alone, tmp_path)
        return everything, alone.everything()

    for everything, mine in run(2, rewritten):
        moments = {name: value for name, value in everything[1].items() if not name.startswith("model.")}
        assert moments
        assert_same({n: v for n, v in mine.items() if not n.startswith("model.")}, moments)


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net()
        change(net)
        return net

    return make


OTHERS: dict[str, tuple[str, Callable[[], nn.Module], str]] = {
    "another optimizer": ("AdamW", Net, r"optimizer: SGD in the checkpoint, AdamW in this job"),
    "joined optimizers": ("muon", Net, r"optimizer: SGD in the checkpoint, Muon and AdamW in this job"),
    "fewer param groups": ("plain", Net, "number of param groups: 2 in the checkpoint, 1 in this job"),
    "a wider layer": (
        "momentum",
        changed(lambda net: setattr(net.head, "bias", nn.Parameter(torch.ones(4)))),
        r"parameter head.bias: torch.float64 of \[3\].*torch.float32 of \[4\]",
    ),
    "a transposed layer": (
        "momentum",
        changed(lambda net: setattr(net.head, "weight", nn.Parameter(torch.ones(5, 3, dtype=torch.float64)))),
        r"parameter head.weight: torch.float64 of \[3, 5\].*of \[5, 3\]",
    ),
    "a layer more": (
        "momentum",
        changed(lambda net: setattr(net, "more", nn.Linear(2, 2))),
        "parameter more.weight: nothing in the checkpoint",
    ),
    "a layer less": (
        "momentum",
        changed(lambda net: setattr(net.encode, "bias", None)),
        r"parameter encode.bias: .* nothing in this job",
    ),
    "other strides": (
        "momentum",
        changed(lambda net: net.conv.to(memory_format=torch.contiguous_format)),
        r"conv.weight: torch.float32 of \[4, 3, 3, 3\] with strides \[27, 1, 9, 3\]",
    ),
    "another dtype": (
        "momentum",
        changed(lambda net: net.conv.double()),
        "conv.weight: .*float32.*float64",
    ),
    "thawed": ("momentum", changed(lambda net: net.frozen.requires_grad_(True)), "parameter frozen.weight"),
    "other buffers": (
        "momentum",
        changed(lambda net: setattr(net, "norm", nn.BatchNorm2d(4, track_running_stats=False))),
        r"buffer norm.running_mean: .* nothing in this job",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("n", [1, 2])
def test_another_model_or_optimizer_is_refused(run, tmp_path: Path, other: str, n: int) -> None:
    optimizer, make, message = OTHERS[other]

    def refused(world: Communicator) -> str:
        if world.rank == 0:
            saved_by(1, 2, tmp_path)
        world.barrier()
        training = Training(form(world), optimizer, make=make)
        with pytest.raises(JobError, match=message) as caught:
            load(training, tmp_path)
        return str(caught.value)

    messages = run(n, refused)
    assert len(set(messages)) == 1
    assert f"{tmp_path}/step-00000004: " in messages[0]


@pytest.mark.ranks(2)
def test_another_division_into_param_groups_is_refused(run, tmp_path: Path, monkeypatch) -> None:
    def swapped(net: nn.Module) -> optim.Optimizer:
        first, second = two_groups(net)
        return optim.SGD([{"params": second["params"], "lr": 0.02}, {"params": first["params"]}], lr=0.1)

    monkeypatch.setitem(OPTIMIZERS, "swapped", swapped)

    def refused(world: Communicator) -> None:
        save(Training(form(world)), tmp_path)
        with pytest.raises(JobError, match=r"param group 1 in the checkpoint, .* param group 0 in this job"):
            load(Training(form(world), "swapped"), tmp_path)

    run(2, refused)


class Overtaken:
    """Checkpoints of which the first one found is removed at once, after a newer one has been written."""

    def __init__(self, inner: Checkpoints, overtake: Callable[[Path], None]) -> None:
        self._inner, self._overtake = inner, overtake
        self.whole = inner.whole

    def newest(self) -> Saved | None:
        found = self._inner.newest()
        if found is not None and found.step == SAVED:
            self._overtake(found.path)
        return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("half", [False, True])
def test_who_finds_a_checkpoint_removed_takes_the_next(run, tmp_path: Path, half: bool) -> None:
    def overtaken(world: Communicator) -> int:
        topology = form(world)
        training = Training(topology)
        training.steps(SAVED)
        save(training, tmp_path)

        def overtake(path: Path) -> None:
            training.steps(LAST - SAVED)
            save(training, tmp_path)
            if world.rank == 0:
                shutil.rmtree(path) if not half else (path / "rank-00001.h5").unlink()
            world.barrier()

        resumed = Training(topology, seed=1)
        checkpoints: Any = Overtaken(Checkpoints(tmp_path, topology), overtake)
        found = restore_newest(checkpoints, resumed.optimizer)
        assert found is not None
        return found[0].step

    assert run(2, overtaken) == [LAST, LAST]


@pytest.mark.ranks(2)
def test_a_file_that_one_rank_cannot_read_ends_all(run, tmp_path: Path) -> None:
    """Only rank 1 fails, after the check; the other rank must not wait for it in a collective."""

    def unreadable(world: Communicator) -> str:
        training = Training(form(world))
        save(training, tmp_path)
        saved = Checkpoints(tmp_path, training.optimizer.topology).newest()
        assert saved is not None
        if world.rank == 1:
            training.optimizer.local.load_states = fail  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(JobError) as caught:
            restore(saved, training.optimizer)
        return str(caught.value)

    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    for message in run(2, unreadable):
        assert message.startswith("rank 1 of 2, reading a checkpoint: OSError: stale file handle")


def test_only_strides_that_mean_something_are_compared() -> None:
    """The stride of a dimension with one element is arbitrary and is not compared."""
    one, other, third = (
        torch.empty_strided((3, 1, 2), strides) for strides in ((1, 7, 3), (1, 9, 3), (4, 1, 1))
    )
    assert _layout(one) == _layout(other) == "torch.float32 of [3, 1, 2] with strides [1, 0, 3]"
    assert _layout(third) == "torch.float32 of [3, 1, 2] with strides [4, 0, 1]"
    assert _layout(third.contiguous()) == "torch.float32 of [3, 1, 2]"
