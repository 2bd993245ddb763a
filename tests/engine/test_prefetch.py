"""Weights that arrive after the step are complete wherever they are read, and nothing else waits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hpcsgd
from hpcsgd.checkpoint import capture
from hpcsgd.comm import Communicator, Work, threads
from hpcsgd.comm.threads import ThreadBackend
from hpcsgd.core.flat import Bucket
from hpcsgd.core.topology import form
from hpcsgd.engine import pending_params
from hpcsgd.errors import UserError
from references import batch, loss, vector
from references import model as make_model

STEPS = 3
LAYER = 1e-6
"""Megabytes per bucket, so few that every parameter has its own bucket."""
PATIENCE = 60.0


class Doubled(torch.autograd.Function):
    """An operation as in an extension: no operation of torch sees the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return torch.from_numpy(weight.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Hazards(nn.Module):
    """A model whose weights are read in other ways than by calling the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.never_called = nn.Linear(6, 6)
        self.detached = nn.Linear(6, 6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.functional = nn.Linear(6, 6)
        self.checkpointed = nn.Linear(6, 6)
        self.normalized = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.doubled = nn.Parameter(torch.randn(6))
        self.bare = nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.einsum("bse,fe->bsf", x, self.never_called.weight) + self.never_called.bias
        x = x * self.detached.weight.detach().norm() + self.detached(x).mean() + self.detached.bias.data.sum()
        x = self.recurrent(x)[0]
        x = torch.func.functional_call(self.functional, dict(self.functional.named_parameters()), x)
        x = x + checkpoint(self.checkpointed, x, use_reentrant=False)
        x = self.normalized(x) * Doubled.apply(self.doubled)
        x = x + torch.stack(list(self.bare)).sum(0)
        return functional.linear(x, self.embedding.weight)  # tied weights


def entropy(net: nn.Module, t: int, rank: int) -> Tensor:
    tokens = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(100 * t + rank))
    return functional.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def wrapped(world: Communicator, net: nn.Module, *, prefetch: bool = True) -> Any:
    inner = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    method = hpcsgd.hierarchical(sync_every=2)
    topology = form(world, max(world.size // 2, 1))
    return hpcsgd.DistributedOptimizer(
        inner, net, topology, method, bucket_cap_mb=LAYER, overlap_param_gather=prefetch
    )


class Held:
    """A replacement for `Work`: a bucket's shards of other ranks are NaN until `wait()` is called."""

    def __init__(self, b: Bucket, work: Work, waits: list[Bucket]) -> None:
        work.wait()
        self._bucket, self._whole, self._waits = b, b.w.clone(), waits
        own = b.param_shard.clone()
        b.w.fill_(torch.nan)
        b.param_shard.copy_(own)

    def wait(self) -> None:
        self._waits.append(self._bucket)
        with torch.no_grad():
            self._bucket.w.copy_(self._whole)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """Hold all gathered weights back until `wait()`, and return the buckets that were waited for."""
    found: list[Bucket] = []
    plain = pending_params.PendingParams.begin

    def begin(pending: pending_params.PendingParams, works: Mapping[Bucket, Work]) -> None:
        held = {b: Held(b, work, found) for b, work in works.items()}
        plain(pending, held)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(pending_params.PendingParams, "begin", begin)
    return found


def test_every_hazard_is_right(waits: list[Bucket]) -> None:
    torch.manual_seed(7)
    model = Hazards()

    def train(world: Communicator, *, prefetch: bool) -> Tensor:
        net = copy.deepcopy(model)
        made = wrapped(world, net, prefetch=prefetch)
        losses = []
        for t in range(STEPS):
            made.zero_grad()
            value = entropy(net, t, world.rank)
            value.backward()
            made.step()
            losses.append(value.detach())
        return torch.cat([torch.stack(losses), vector(net)])

    plain = threads.run(4, lambda world: train(world, prefetch=False), timeout=PATIENCE)
    assert waits == []
    late = threads.run(4, lambda world: train(world, prefetch=True), timeout=PATIENCE)
    assert len(waits) > 0
    assert all(torch.isfinite(found).all() for found in plain)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(late, plain, strict=True))


def a_step(net: nn.Module, made: Any, t: int = 0) -> None:
    made.zero_grad()
    loss(net, *batch(t, made.topology.rank)).backward()
    made.step()


READERS: dict[str, Callable[[nn.Module, Any], object]] = {
    "the model's state": lambda net, made: net.state_dict(),
    "the optimizer's state": lambda net, made: made.state_dict(),
    "a checkpoint": lambda net, made: capture(made, shared={}, own={}),
    "the buckets": lambda net, made: made.buckets,
    "a meeting": lambda net, made: made.average_models(),
    "the mean model": lambda net, made: made.averaged_model().__enter__(),
    "a copy": lambda net, made: copy.deepcopy(net),
    "a file": lambda net, made: torch.save(net, io.BytesIO()),
    "a norm": lambda net, made: nn.utils.get_total_norm(list(net.parameters()), foreach=True),
    "memory": lambda net, made: [param.data_ptr() for param in net.parameters()],
    "numpy": lambda net, made: [param.detach().numpy() for param in net.parameters()],
    "assignment": lambda net, made: [param.data.zero_() for param in net.parameters()],
    "printing": lambda net, made: [repr(param) for param in net.parameters()],
}


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_waits(reader: str, waits: list[Bucket]) -> None:
    def read(world: Communicator) -> bool:
        net = make_model()
        made = wrapped(world, net)
        a_step(net, made)
        assert not any(b in waits for b in made._step.buckets)
        READERS[reader](net, made)
        read_first = all(b in waits for b in made._step.buckets)
        assert all(type(param) is nn.Parameter for param in net.parameters())
        assert torch.isfinite(vector(net)).all()
        return read_first

    assert all(threads.run(2, read, timeout=PATIENCE))


def test_weights_given_by_name_arrive(waits: list[Bucket]) -> None:
    """Weights passed by keyword arrive, also in lists."""

    def read(world: Communicator) -> bool:
        net = make_model()
        made = wrapped(world, net)
        x = torch.ones(2, 5, dtype=torch.float64)
        a_step(net, made)
        first = functional.linear(x, weight=net[0].weight)
        second = torch.cat(tensors=[net[0].bias, net[3].bias])
        return bool(first.isfinite().all() and second.isfinite().all())

    assert all(threads.run(2, read, timeout=PATIENCE))


def test_the_next_step_begins_when_all_is_there(waits: list[Bucket]) -> None:
    """The next step waits for all weights, also for those that the forward pass has not used."""

    def train(world: Communicator) -> bool:
        net = make_model()
        made = wrapped(world, net)
        for t in range(2):
            a_step(net, made, t)
        return all(b in waits for b in made._step.buckets) and bool(torch.isfinite(vector(net)).all())

    assert all(threads.run(2, train, timeout=PATIENCE))


def test_copies_are_plain(waits: list[Bucket]) -> None:
    def read(world: Communicator) -> bool:
        net = make_model()
        made = wrapped(world, net)
        a_step(net, made)
        copied = copy.deepcopy(net)
        assert all(type(param) is nn.Parameter for param in copied.parameters())
        return torch.equal(vector(copied), vector(net))

    assert all(threads.run(2, read, timeout=PATIENCE))


def test_who_needs_no_values_does_not_wait(waits: list[Bucket]) -> None:
    def ask(world: Communicator) -> None:
        net = make_model()
        made = wrapped(world, net)
        a_step(net, made)
        net.zero_grad()
        made.zero_grad(set_to_none=False)
        assert sum(param.shape.numel() for param in net.parameters() if param.requires_grad) > 0
        assert all(param.grad is None or param.dtype == torch.float64 for param in net.parameters())
        assert made.metrics is not None
        mine = {id(b) for b in made._step.buckets}
        assert not any(id(b) in mine for b in waits)

    threads.run(2, ask, timeout=PATIENCE)


def test_a_layer_waits_for_its_own_weights_alone(waits: list[Bucket]) -> None:
    """The weights that the forward pass uses first are also gathered first."""

    def use(world: Communicator) -> list[str]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        made = wrapped(world, net)
        value = net(torch.ones(2, 3)).sum()
        value.backward()
        made.step()
        left = [b.slots[0].name for b in order if any(b is mine for mine in made._step.buckets)]
        net[0](torch.ones(2, 3))
        assert [type(param) is nn.Parameter for param in net.parameters()] == [True, True, False, False]
        return left

    order: list[Bucket] = []
    plain = pending_params.PendingParams.begin

    def begin(pending: pending_params.PendingParams, works: Mapping[Bucket, Work]) -> None:
        order.extend(works)
        plain(pending, works)

    with mock.patch.object(pending_params.PendingParams, "begin", begin):
        for left in threads.run(2, use, timeout=PATIENCE):
            assert left == ["0.weight", "0.bias", "2.weight", "2.bias"]


class Unseen(nn.Linear):
    """A layer as in a C++ extension: torch does not see that it reads its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return functional.linear(x, self.weight, self.bias)


def test_a_layer_that_torch_does_not_see_waits_before_its_call(waits: list[Bucket]) -> None:
    def use(world: Communicator) -> bool:
        net = nn.Sequential(Unseen(3, 2))
        made = wrapped(world, net)
        net(torch.ones(2, 3)).sum().backward()
        made.step()
        assert not any(b in waits for b in made._step.buckets)
        net(torch.ones(2, 3))
        return all(b in waits for b in made._step.buckets)

    assert all(threads.run(2, use, timeout=PATIENCE))


class Own(nn.Parameter):
    """A parameter class of another library."""


def test_parameters_of_other_classes_arrive_in_the_step(waits: list[Bucket]) -> None:
    def train(world: Communicator) -> None:
        net = nn.Linear(3, 2)
        net.weight = Own(net.weight.data)
        made = wrapped(world, net)
        net(torch.ones(1, 3)).sum().backward()
        made.step()
        assert type(net.weight) is Own
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.isfinite(net.weight).all()

    threads.run(2, train, timeout=PATIENCE)


def test_the_job_ends_with_weights_under_way() -> None:
    nets: list[nn.Module] = []

    def train(world: Communicator) -> Tensor:
        net = make_model(world.rank)
        made = wrapped(world, net)
        a_step(net, made)
        nets.append(net)
        return vector(net) if world.rank == 0 else torch.empty(0)

    expected = threads.run(2, train, timeout=PATIENCE)[0]
    for net in nets:
        assert torch.equal(vector(net), expected)


def test_who_waits_hears_what_went_wrong() -> None:
    def train(world: Communicator) -> None:
        net = make_model()
        made = wrapped(world, net)
        a_step(net, made)
        with pytest.raises(RuntimeError, match="the link is gone"):
            loss(net, *batch(1, world.rank))
        with pytest.raises(RuntimeError, match="the link is gone"):
            made.step()

    def gone(backend: ThreadBackend, out: Tensor, x: Tensor) -> None:
        if x.dtype != torch.uint8:  # uint8 messages only compare the calls of ranks
            raise RuntimeError("the link is gone")
        plain_allgather(backend, out, x)

    plain_allgather = ThreadBackend.allgather
    with mock.patch.object(ThreadBackend, "allgather", gone):
        threads.run(2, train, timeout=PATIENCE)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "compiled",
    [
        lambda net: torch.compile(net, backend="eager"),
        lambda net: nn.Sequential(torch.jit.script(net)),
        lambda net: net[0].compile(backend="eager") or net,
    ],
    ids=["whole", "scripted", "a region"],
)
def test_compiled_models_are_refused(compiled: Callable[[nn.Module], nn.Module]) -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(
        UserError, match=r"overlap_param_gather: (the model|0) is compiled, .* leave one of them out"
    ):
        pending_params.PendingParams(compiled(net), wanted=True)
    pending_params.PendingParams(compiled(net), wanted=False)
