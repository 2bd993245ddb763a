"""The public API accepts an argument if it is right, or refuses it in one line that names the argument."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd
import hpcsgd.comm
import public_names
from hpcsgd import UserError
from hpcsgd.arguments import checked
from hpcsgd.comm import Communicator
from hpcsgd.core.topology import Topology, form
from hpcsgd.data.injection import InjectedBatches
from hpcsgd.errors import in_one_line, without_warnings
from hpcsgd.performance.probing import own
from references import model as make_model

NOT_SWEPT = {
    "Topology": "it is made by init alone",
    "JobError": "an exception",
    "UserError": "an exception",
    "graphs.Graph": "a protocol",
    "graphs.senders": "methods call it in every step",
}
METHODS = {
    "DistributedOptimizer": [
        "set_gradient_accumulation_steps",
        "clip_grad_norm_",
        "step",
        "consolidate_state_dict",
    ],
    "Sampler": ["set_epoch"],
}
"""Methods that a training script calls on our objects, and that take more than objects."""
SAID_AS = {"data": "samples", "per_step": "peers", "start": "samples consumed"}
"""Arguments that a line names by their meaning."""
LONG = "x" * 5000
LONGEST = 1200
"""The largest number of characters of a line."""
VALUES: tuple[Any, ...] = (
    "4", "no", LONG, 2.5, 2.0, True, -1, 0, 10**30, math.nan, math.inf, -math.inf, None, int, [], [1, "x"],
    {}, b"4", object(), np.ones(2), torch.ones(2), np.float64("nan"), torch.tensor(True),
)  # fmt: skip
NUMBERS = {int: (int, np.integer), float: (int, float, np.integer, np.floating), bool: (bool, np.bool_)}


class Scene:
    """Right values for the required arguments, by their names."""

    def __init__(self, topology: Topology, folder: Path) -> None:
        net = make_model()
        self.data = TensorDataset(torch.randn(16, 3), torch.zeros(16, dtype=torch.int64))
        self.topology, self.model, self.folder = topology, net, folder
        self.optimizer = optim.SGD(net.parameters(), 0.1)
        self.params = list(net.parameters())
        self.inner = self.averager = hpcsgd.hierarchical(8).averager
        self.loader: Any = [1, 2]
        self.sampler = hpcsgd.Sampler(self.data, topology)
        self.injection = hpcsgd.Injection(0.5, 0.5)
        self.held_out, self.grad_reduce, self.schedule = self.data, hpcsgd.Dense(), hpcsgd.bsp().schedule
        self.sparsifier, self.method = hpcsgd.TopK(0.1), hpcsgd.hierarchical(8)
        self.first = self.then = hpcsgd.bsp()
        self.every = self.sync_every = self.initial_sync_every = self.at = 8
        self.batch_size = self.batch = self.b = 8
        self.adapt_every = self.per_step = self.num_fragments = self.P = 2
        self.max_staleness = self.overlap_steps = self.sync_delay = self.steps = self.passes = self.epoch = 1
        self.delta = self.density = self.threshold = self.alpha = self.beta = self.share = self.start = 0.5
        self.device, self.x, self.op, self.root = "cpu", 1.0, "mean", 0
        self.to = 0
        self.total_steps = 100
        self.momentum, self.lr, self.max_norm, self.steps_per_epoch, self.rule = 0.9, 0.1, 1.0, 100, "linear"

    def of(self, name: str, key: str) -> Any:
        """Return the right value for an argument of the callable `name`."""
        if name == "probe" and key in ("model", "optimizer"):
            return {"model": lambda: nn.Linear(3, 2), "optimizer": optim.SGD}[key]
        if name == "muon" and key == "model":
            return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        if name == "Injected" and key == "loader":
            batches = InjectedBatches(self.sampler, self.topology, 8, self.injection)
            return DataLoader(self.data, batch_sampler=batches)
        return getattr(self, key)

    def wrapped(self) -> hpcsgd.DistributedOptimizer:
        return hpcsgd.DistributedOptimizer(self.optimizer, self.model, self.topology, hpcsgd.bsp())

    def owner(self, name: str) -> Any:
        return {"DistributedOptimizer": self.wrapped, "Sampler": lambda: self.sampler}[name]()


def swept() -> list[str]:
    names = [name for name in public_names.public() if name not in NOT_SWEPT]
    return [*names, *(f"{owner}.{method}" for owner, methods in METHODS.items() for method in methods)]


def call_of(name: str, scene: Scene) -> Callable[..., Any]:
    owner, _, method = name.partition(".")
    if owner in METHODS and method:
        return getattr(scene.owner(owner), method)
    api = public_names.public()[name]
    return (lambda *a, **k: list(api(*a, **k))) if name == "equal_batches" else api


def signature_of(name: str) -> inspect.Signature:
    owner, _, method = name.partition(".")
    names = public_names.public()
    api = getattr(names[owner], method) if owner in METHODS and method else names[name]
    return inspect.signature(api, eval_str=True)


def kinds_of(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [kind for each in get_args(annotation) for kind in kinds_of(each)]
    return [annotation]


def may_be(kind: Any, value: Any) -> bool:
    """Return True if `value` may be meant for `kind`.

    Such a value is right, or it is refused only for its size, as -1 is for a count.
    """
    kind, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if isinstance(value, float) and math.isnan(value):
        return False
    if kind in NUMBERS:
        return (isinstance(value, NUMBERS[kind]) and (kind is bool or not isinstance(value, bool))) or (
            kind is bool and isinstance(value, torch.Tensor) and value.ndim == 0
        )
    if kind in (None, NoneType):
        return value is None
    if kind is Literal:
        return isinstance(value, str) and value in inner
    if isinstance(value, type):
        return False
    if kind is Callable:
        return callable(value)
    if kind in (str, Path):
        return isinstance(value, str)
    if isinstance(value, str | bytes):
        return False
    if kind.__name__ in ("Dataset", "Sequence", "Iterable", "Sized", "Mapping", "ndarray", "Tensor"):
        return hasattr(value, "__getitem__") or hasattr(value, "__iter__")
    return isinstance(value, kind)


def refused(call: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Return the message of the call's `UserError` in one line, or None. Other exceptions are not caught."""
    try:
        call(**arguments)
    except UserError as error:
        return in_one_line(error)
    return None


def cases(name: str) -> Iterator[tuple[str, Any, bool]]:
    for key, parameter in signature_of(name).parameters.items():
        if key == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kinds = kinds_of(parameter.annotation)
        for value in VALUES:
            if isinstance(value, type) and any(get_origin(kind) is Callable for kind in kinds):
                continue  # a class is callable, and so it may be right
            nan = key == "loss" and isinstance(value, float)  # a training that diverges has such a loss
            yield key, value, nan or any(may_be(kind, value) for kind in kinds)


def given_to(name: str, scene: Scene) -> dict[str, Any]:
    """Return the required arguments of a call. A scaler is one for the CPU."""
    named = [
        p.name
        for p in signature_of(name).parameters.values()
        if p.name != "self"
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and (p.default is p.empty or (name, p.name) == ("GradScaler", "device"))
    ]
    return {key: scene.of(name, key) for key in named}


def without_mpi(world: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `init` use these ranks, and make a probe do nothing."""
    mpi = SimpleNamespace(world=lambda timeout=600.0: world)
    monkeypatch.setitem(sys.modules, "hpcsgd.comm.mpi", mpi)
    monkeypatch.setitem(sys.modules, "hpcsgd.comm.mpi_library", mpi)  # otherwise its import starts MPI
    monkeypatch.setattr(hpcsgd.comm, "mpi", mpi, raising=False)
    monkeypatch.setattr(own, "probe_groups", lambda *_, **__: None)


@pytest.mark.slow
@pytest.mark.ranks(1)
@pytest.mark.threads
@pytest.mark.parametrize("name", swept())
def test_every_argument_of_every_call(
    run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(topology: Topology, key: str, value: Any, possible: bool) -> str | None:
        scene = Scene(topology, tmp_path)
        given = given_to(name, scene) | {key: value}
        try:
            with without_warnings():
                line = refused(call_of(name, scene), given)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        if line is None:
            return None if possible else "taken"
        named = key in line or SAID_AS.get(key, key) in line
        if not possible:  # the call itself must refuse it, not a function that it calls
            named = line.startswith(f"{name.rpartition('.')[2]}: {key} = ")
        return None if named and "\n" not in line and len(line) <= LONGEST else line

    def sweep(world: Communicator) -> list[str]:
        without_mpi(world, monkeypatch)
        topology = form(world)
        # If it is called correctly, `fully_shard` makes torch create the default group of this process.
        tried = [case for case in cases(name) if name != "fully_shard" or not case[2]]
        found = [(key, value, fault(topology, key, value, possible)) for key, value, possible in tried]
        return [f"{key} = {value!r:.40}: {told}" for key, value, told in found if told is not None]

    (faults,) = run(1, sweep)
    assert not faults, "\n".join(faults)


SIZES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("init", "groups", (0, -1)),
    ("init", "group_size", (0, -1)),
    ("init", "timeout_s", (0, -1.0, math.inf)),
    ("DistributedOptimizer", "gradient_accumulation_steps", (0, -1)),
    ("DistributedOptimizer", "bucket_cap_mb", (0, -1.0, math.inf)),
    ("DistributedOptimizer.set_gradient_accumulation_steps", "passes", (0, -1)),
    ("GradScaler", "init_scale", (0, math.inf)),
    ("GradScaler", "growth_interval", (0,)),
    ("InjectedBatches", "b", (0, -1)),
    ("Loader", "num_workers", (-1,)),
    ("fedavg", "steps_per_epoch", (0, -1)),
    ("QHAdam", "lr", (-1.0, math.inf)),
    ("hierarchical", "sync_every", (0, -1)),
    ("lr_scale", "P", (0, -1)),
    ("muon", "lr", (-1.0, math.inf)),
    ("probe", "batch_size", (0, -1)),
    ("probe", "lr", (0, -1.0, math.inf)),
]


@pytest.mark.ranks(1)
@pytest.mark.threads
def test_sizes_that_make_no_sense_are_refused(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(world: Communicator) -> list[tuple[str, str, Any]]:
        without_mpi(world, monkeypatch)
        topology, found = form(world), []
        for name, key, values in SIZES:
            for value in values:
                scene = Scene(topology, tmp_path)
                if refused(call_of(name, scene), given_to(name, scene) | {key: value}) is None:
                    found.append((name, key, value))
        return found

    assert run(1, taken) == [[]]


def test_numbers_of_numpy_and_torch_are_taken_as_what_they_are() -> None:
    @checked
    def taking(count: int, rate: float, on: bool, counts: Sequence[int] = ()) -> tuple[Any, ...]:
        return count, rate, on, list(counts)

    call: Any = taking

    right = (3, 0.5, True, [1, 2])
    assert call(*right) == right
    assert call(np.int64(3), np.float32(0.5), np.bool_(True), np.array([1, 2])) == right
    assert call(torch.tensor(3), torch.tensor(0.5), torch.tensor(True), torch.tensor([1, 2])) == right
    for value in (torch.tensor(3.0), torch.tensor([3]), np.array([3]), np.float64(3), np.bool_(True)):
        with pytest.raises(UserError, match=r"^taking: count = .*: expected a whole number"):
            call(value, 0.5, True)


api: Any = hpcsgd


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: api.hierarchical(sync_evry=8),
            "hierarchical has no argument 'sync_evry'; did you mean 'sync_every'?",
        ),
        (api.hierarchical, "hierarchical: missing a required argument: 'sync_every'; expected "),
        (
            lambda: api.hierarchical("8"),
            "hierarchical: sync_every = '8': expected a whole number: did you mean 8?",
        ),
        (
            lambda: api.hierarchical(8, hpcsgd.Dense),
            "hierarchical: grad_reduce = Dense: expected a GradReduce, which",
        ),
        (
            lambda: api.d_psgd("ring"),
            "d_psgd: graph = 'ring': expected a Graph, which a call makes: did you mean h",
        ),
        (
            lambda: api.Sparse(3),
            "Sparse: sparsifier = 3: expected a Sparsifier, as hpcsgd.CLTk(density=…) makes i",
        ),
    ],
)
def test_the_line_says_what_was_meant(call: Callable[[], Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value).startswith(line)
