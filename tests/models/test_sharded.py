"""FSDP models, which no rank has whole: they start from what was requested, the same for every K."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcsgd.comm import Communicator
from hpcsgd.core.fsdp import all_gathered, is_fsdp
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.models import build, gpt
from hpcsgd.models.gpt import GPT
from hpcsgd.models.sharded import fully_shard, without_values
from hpcsgd.models.weights import whole_state

pytestmark = pytest.mark.processes
META = torch.device("meta")


class Net(nn.Module):
    """A model with buffers, a weight that two modules share, uneven rows, and a frozen module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.embedding = nn.Embedding(5, 7)
        self.scores = nn.Linear(7, 5)
        self.scores.weight = self.embedding.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


def expected(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the expected state if each module is initialized with its own generator.

    The first of the modules that share a tensor initializes it.
    """
    started = set[nn.Parameter]()
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not started.issuperset(own):
            before = {p: p.detach().clone() for p in started.intersection(own)}
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(random.Random(f"{seed} {name}").getrandbits(63))
                module.reset_parameters()  # pyright: ignore[reportCallIssue]
                if isinstance(model, GPT):
                    model._init_weights(module)
                for p, values in before.items():
                    p.copy_(values)
            started.update(own)
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(37, width=12, layers=2, heads=2),
    "net": Net,
}


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_starts_from_the_same_bits_for_every_K(run, name: str, n: int) -> None:
    def full(world: Communicator) -> dict[str, Tensor]:
        topology = form(world, 1)
        with META if name == "gpt" else without_values():
            model = MODELS[name]()
        assert all(p.device == META for p in model.parameters())
        assert fully_shard(model, topology, seed=5) is model
        assert all(is_fsdp(p) for p in model.parameters())
        return whole_state(model, keeps=True)

    wanted = expected(MODELS[name](), 5)
    for found in run(n, full):
        assert found.keys() == wanted.keys()
        for key, x in found.items():
            assert torch.equal(x, wanted[key]), key


@pytest.mark.ranks(4)
def test_one_that_has_values_is_rank_0s(run) -> None:
    def full(world: Communicator) -> dict[str, Tensor]:
        topology = form(world, 2)
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        mine = model[0].weight.detach().clone()
        fully_shard(model, topology, units=["0", "2"])
        found = whole_state(model, keeps=True)
        return {"mine": mine, "found": found["0.weight"]}

    ranks = run(4, full)
    for rank in ranks:
        assert torch.equal(rank["found"], ranks[0]["mine"])
    assert not torch.equal(ranks[1]["mine"], ranks[0]["mine"])


@pytest.mark.ranks(4)
def test_each_block_is_gathered_by_itself(run) -> None:
    def units(world: Communicator) -> list[list[str]]:
        topology = form(world, 2)
        found = []
        for blocks in (None, ["blocks.*.attention", "scores"], []):
            with META:
                model = gpt(37, width=12, layers=2, heads=2, tied=False)
            fully_shard(model, topology, blocks)
            found.append([n for n, m in model.named_modules() if type(m).__name__.startswith("FSDP")])
        return found

    attentions = ["", "blocks.0.attention", "blocks.1.attention", "scores"]
    assert run(4, units) == [[["", "blocks.0", "blocks.1"], attentions, [""]]] * 4


@pytest.mark.ranks(2)
def test_models_of_transformers(run) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}

    def losses(world: Communicator) -> tuple[float, float]:
        with without_values():
            model = build("transformers:AutoModelForCausalLM", {"model_type": "llama", **sizes, **heads})
        fully_shard(model, form(world, 1))
        x = torch.arange(20).view(2, 10) % 32
        scores = model(x)
        spread = all_gathered(next(p for n, p in model.named_parameters() if "q_proj" in n)).std().item()
        return nn.functional.cross_entropy(scores.flatten(0, 1), x.flatten()).item(), spread

    for loss, spread in run(2, losses):
        assert loss == pytest.approx(torch.tensor(32.0).log().item(), abs=0.1)
        assert spread == pytest.approx(0.02, rel=0.5)


@pytest.mark.ranks(4)
def test_gradients_of_16_bits_are_added_up_in_more(run) -> None:
    """The mean is rounded once. A sum in bfloat16 would be rounded at every addition."""
    xs = [torch.randn(1, 64, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(4)]

    def mean(world: Communicator) -> Tensor:
        with META:
            model = nn.Linear(64, 8, bias=False, dtype=torch.bfloat16)
        fully_shard(model, form(world, 1))
        model(xs[world.rank]).sum().backward()
        assert model.weight.grad is not None
        return all_gathered(model.weight.grad).float()

    expected = torch.stack([x.float() for x in xs]).mean(0).bfloat16().float().expand(8, 64)
    for found in run(4, mean):
        assert torch.equal(found, expected)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.linear = nn.Linear(3, 3)


class Tables(nn.Linear):
    """A layer with a buffer that `reset_parameters()` does not initialize."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", table)


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str] | None, str]] = {
    "a name": (lambda: nn.Sequential(nn.Linear(2, 2)), ["1"], "units: no module '1'"),
    "nobody to give values": (
        lambda: nn.Sequential(Bare()),
        None,
        "0 (Bare) has no reset_parameters(), and the model no _init_weights(module)",
    ),
    "a buffer": (Table, None, "table is on the meta device, and nothing initializes it"),
    "a table of a layer": (lambda: Tables(torch.arange(4.0)), None, "table is on the meta device"),
    "whole numbers": (lambda: Tables(torch.arange(4)), None, "table is on the meta device"),
    "marks": (lambda: Tables(torch.ones(2, dtype=torch.bool)), None, "table is on the meta device"),
    "a memory format": (
        lambda: nn.Conv2d(2, 4, 3, device="cpu").to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        None,
        "torch cannot shard Conv2d: FSDP does not support non-contiguous parameters",
    ),
    "a single number": (
        lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones((), device="cpu"))}),
        None,
        "torch cannot shard",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks", "fully_shard has no argument 'blocks'; did you mean 'units'?"),
        ("offload", "fully_shard has no argument 'offload'; did you mean 'offload_policy'?"),
        ("mesh", "fully_shard has no argument 'mesh'; "),
    ],
)
def test_an_argument_that_neither_torch_nor_hpcsgd_knows(run, name: str, message: str) -> None:
    policy: dict[str, Any] = {name: None}

    def refused(world: Communicator) -> bool:
        with pytest.raises(JobError, match=re.escape(message)):
            fully_shard(nn.Linear(2, 2), form(world, 1), **policy)
        return True

    assert run(2, refused) == [True, True]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", REFUSED)
def test_refused(run, what: str) -> None:
    make, blocks, message = REFUSED[what]

    def refused(world: Communicator) -> bool:
        with META:
            model = make()
        with pytest.raises(JobError) as caught:
            fully_shard(model, form(world, 1), blocks)
        assert message in str(caught.value), caught.value
        assert "\n" not in str(caught.value)
        return True

    assert run(2, refused) == [True, True]


class Marked(Net):
    """`Net` with a buffer of numbers and a buffer of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("marks", torch.rand(3) < 0.5)


@pytest.mark.ranks(4)
def test_rank_0_alone_need_have_values(run) -> None:
    def given(world: Communicator) -> bool:
        torch.manual_seed(0)
        mine = Marked()
        with META if world.rank else nullcontext():
            model = deepcopy(mine) if world.rank == 0 else Marked()
        assert world.rank == 0 or all(x.device == META for x in model.state_dict().values())
        fully_shard(model, form(world, 2), units=["conv", "frozen"])
        found = whole_state(model, keeps=True)
        assert model.scores.weight is model.embedding.weight
        assert not model.frozen.weight.requires_grad
        return all(torch.equal(found[name], x) for name, x in mine.state_dict().items())

    assert run(4, given) == [True] * 4


OTHERS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], list[str]], str]] = {
    "no values on rank 0": (
        lambda rank: nn.Linear(2, 3, device="cpu" if rank else META),
        lambda rank: [],
        "rank 1 of 4, sharding the model: weight has values here but none on rank 0",
    ),
    "other units": (
        lambda rank: nn.Sequential(nn.Linear(2, 3)),
        lambda rank: ["0"] * (rank == 2),
        "rank 2 of 4, sharding the model: units: 0, the model on 'cpu' here, the model on 'cpu' on rank 0",
    ),
    "other shapes": (
        lambda rank: nn.Linear(2, 3 + rank // 3),
        lambda rank: [],
        "rank 3 of 4, sharding the model: weight: torch.float32 of [4, 2] here, torch.float32 of [3, 2] on",
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("what", OTHERS)
def test_ranks_of_other_models_are_reported(run, what: str) -> None:
    """All ranks raise the error, and none waits for another one."""
    make, units, message = OTHERS[what]

    def refused(world: Communicator) -> bool:
        with pytest.raises(JobError) as caught:
            fully_shard(make(world.rank), form(world, 2), units(world.rank))
        assert message in str(caught.value), caught.value
        return True

    assert run(4, refused) == [True] * 4


@pytest.mark.ranks(2)
def test_refused_before_torch_does(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """hpcsgd refuses these models before torch does.

    Torch would raise an assertion error at the second call or at the first forward pass, or no error at all.
    """
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)

    def refused(world: Communicator) -> bool:
        topology = form(world, 1)
        with pytest.raises(JobError, match="torch has sharded FSDPLinear already: call"):
            fully_shard(fully_shard(nn.Linear(2, 3), topology), topology)
        of_two = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3, dtype=torch.bfloat16))
        with pytest.raises(JobError, match=r"Sequential: its parameters are of torch.bfloat16, torch"):
            fully_shard(of_two, topology)
        assert fully_shard(of_two, topology, ["1"]) is of_two
        with pytest.raises(JobError, match=r"device = 'cuda:1': torch shards onto the current device"):
            fully_shard(nn.Linear(2, 3), topology, device="cuda:1")
        return True

    assert run(2, refused) == [True] * 2


@pytest.mark.ranks(2)
def test_chance_on_devices_is_left_alone(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of devices are not seeded. Otherwise all ranks would draw the same dropout from then on."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)

    def seeded(world: Communicator) -> bool:
        with META:
            model = nn.Linear(2, 3)
        fully_shard(model, form(world, 1))
        return bool(seeds)

    assert run(2, seeded) == [False] * 2
