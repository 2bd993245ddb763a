from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn, optim
from torch.optim import lr_scheduler

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.graphs import Exponential, Graph, PowersOfTwo, Ring
from hpcsgd.core.topology import form
from hpcsgd.data import crop_and_flip
from hpcsgd.engine.iterates import in_train_mode
from hpcsgd.errors import JobError
from hpcsgd.methods import hierarchical
from hpcsgd.methods.diloco import OuterOptimizer
from hpcsgd.methods.fedavg import PerEpoch
from hpcsgd.parts.grad_reduces import Dense, ReduceScatter
from hpcsgd.train.evaluation import evaluate
from hpcsgd.train.training_setup import TrainingSetup, assemble
from references import vector
from train.launches import JOB, make_store

TRAIN = 50


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    make_store(folder / "small.h5", TRAIN)
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


def on_ranks(
    job_file: Path, words: str, of: Callable[[TrainingSetup], Any], *, n: int = 1, P: int | None = None
) -> list[Any]:
    """Return `of(setup)` on each of `n` ranks, with the training setup of these words."""

    def one(world: Communicator) -> Any:
        return of(assemble(load(job_file, words.split()), form(world, P), "job.toml"))

    return threads.run(n, one)


def net(start: float = 0.5) -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 10))
    for p in layers.parameters():
        nn.init.constant_(p, start)
    return layers


def brighter(x: Tensor, _: Generator) -> Tensor:
    return x + 1


def half_rate(parameters: Any, lr: float) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=lr / 2)


def of_the_model(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), lr=lr / 4)


def rate(_: Any, lr: float) -> float:
    return lr


def slowing(optimizer: optim.Optimizer, by: float = 0.5) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ExponentialLR(optimizer, by)


HERE = "train.test_assembly"


def test_functions_of_the_user_take_part(job_file: Path) -> None:
    words = (
        f"--model.name {HERE}:net --model.arguments {{start=0.25}} --optimizer.name {HERE}:half_rate "
        f"--lr_schedule.name {HERE}:slowing --lr_schedule.arguments.by 0.75 --data.transform {HERE}:brighter"
    )

    def check(parts: TrainingSetup) -> None:
        assert {p.unique().item() for p in parts.model.parameters()} == {0.25}
        assert isinstance(parts.optimizer.local.optimizer, optim.Adagrad)
        assert parts.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        assert isinstance(parts.scheduler, lr_scheduler.ExponentialLR)
        assert parts.scheduler.gamma == 0.75
        assert torch.equal(parts.transform(torch.zeros(2), parts.generator), torch.ones(2))

    on_ranks(job_file, words, check)


def hidden() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 10))


def test_muon_is_made_of_the_model(job_file: Path) -> None:
    words = (
        f"--model.name {HERE}:hidden --model.arguments {{}} --optimizer.name Muon --optimizer.lr 0.02 "
        "--optimizer.arguments {momentum=0.9,rest={lr=0.001,betas=[0.8,0.9]}}"
    )

    def read(parts: TrainingSetup) -> list[tuple[Any, ...]]:
        return [
            (g["lr"], g.get("momentum"), g.get("betas"), sum(p.numel() for p in g["params"]))
            for g in parts.optimizer.param_groups
        ]

    (groups,) = on_ranks(job_file, words, read)
    assert groups == [(0.02, 0.9, None, 288), (0.001, None, (0.8, 0.9), 8 + 80 + 10)]
    with pytest.raises(JobError, match=r"\[optimizer.arguments\]: muon has no argument 'momenta'"):
        on_ranks(job_file, words.replace("momentum", "momenta"), read)


def test_quasi_hyperbolic_adam_by_its_name(job_file: Path) -> None:
    words = "--optimizer.name QHAdam --optimizer.arguments {betas=[0.99,0.95],nu=0.8}"
    (group,) = on_ranks(job_file, words, lambda parts: parts.optimizer.param_groups[0])
    assert (group["betas"], group["nu"]) == ((0.99, 0.95), 0.8)
    with pytest.raises(JobError, match=r"QHAdam: nu = 2.0: expected a number from 0 to 1"):
        on_ranks(job_file, words.replace("0.8", "2.0"), lambda parts: None)


def test_optimizers_of_the_user_may_take_the_model(job_file: Path) -> None:
    words = f"--optimizer.name {HERE}:of_the_model"
    assert on_ranks(job_file, words, lambda parts: parts.optimizer.param_groups[0]["lr"]) == [0.025]


def test_optimizers_with_modes_are_in_training_mode_and_evaluated_in_eval_mode(job_file: Path) -> None:
    """A job file needs no calls of train() and eval()."""

    def trained(parts: TrainingSetup) -> tuple[Any, Any, Any]:
        (x, y), before = next(iter(parts.loader)), in_train_mode(parts.optimizer.local.optimizer)
        for _ in range(3):
            parts.optimizer.zero_grad()
            nn.functional.cross_entropy(parts.model(x.float()), y).backward()
            parts.optimizer.step()
        weights = vector(parts.model)
        score = evaluate(parts)
        assert torch.equal(vector(parts.model), weights)
        parts.optimizer.eval()
        assert evaluate(parts).loss == score.loss
        return before, in_train_mode(parts.optimizer.local.optimizer), score.loss

    words = "--optimizer.name special_optimizers:ScheduleFree"
    (first, second) = on_ranks(job_file, words, trained, n=2, P=2)
    assert first[:2] == second[:2] == (True, False)
    assert first[2] == second[2]


@pytest.mark.parametrize("words", ["", "--data.transform crop_and_flip"])
def test_short_names(job_file: Path, words: str) -> None:
    transforms = on_ranks(job_file, words, lambda parts: parts.transform)
    x = torch.rand(2, 1, 6, 6)
    if words:
        assert transforms == [crop_and_flip]
    else:
        assert transforms[0](x, Generator()) is x


@pytest.mark.parametrize("words", ["", "--training.broadcast_buffers true"])
def test_buffers_are_broadcast_where_the_job_file_says_so(job_file: Path, words: str) -> None:
    def taken(parts: TrainingSetup) -> list[int]:
        parts.model.register_buffer("at", torch.tensor(parts.optimizer.topology.rank))
        for batch in parts.loader:
            parts.optimizer.zero_grad()
            parts.model(batch[0].float()).sum().backward()
            parts.optimizer.step()
            break
        return [int(x) for name, x in parts.model.named_buffers() if name == "at"]

    assert on_ranks(job_file, words, taken, n=2, P=1) == ([[0], [0]] if words else [[0], [1]])


PARTS = [
    ("", Dense, hierarchical(sync_every=2)),
    ("--method.grad_reduce reduce_scatter", ReduceScatter, hierarchical(2, grad_reduce=ReduceScatter())),
    ("--method.sync_every 5", Dense, hierarchical(sync_every=5)),
]


@pytest.mark.parametrize(("words", "grad_reduce", "method"), PARTS)
def test_a_method_and_its_parts(job_file: Path, words: str, grad_reduce: type, method: Any) -> None:
    (made,) = on_ranks(job_file, words, lambda parts: parts.optimizer.method)
    assert made == method
    assert isinstance(made.grad_reduce, grad_reduce)


def with_method(job_file: Path, name: str, method: str) -> Path:
    text = JOB.replace('name = "hierarchical"\nsync_every = 2\n', method)
    assert text != JOB
    job_file.with_name(name).write_text(text)
    return job_file.with_name(name)


@pytest.mark.parametrize(
    ("words", "S"), [("", 4), ("--data.group_batch_size 5", 10), ("--method.steps_per_epoch 7", 7)]
)
def test_the_steps_of_an_epoch_come_by_themselves(job_file: Path, words: str, S: int) -> None:
    """Every method that needs the number gets it, unless the job file gives one."""
    file = with_method(job_file, "fedavg.toml", 'name = "fedavg"\nper_epoch = 3\n')
    (made,) = on_ranks(file, words, lambda parts: parts.optimizer.method)
    assert made.schedule == PerEpoch(3, S)
    switched = 'name = "switch"\nfirst = { name = "bsp" }\nthen = { name = "fedavg" }\nat = 7\n'
    (made,) = on_ranks(with_method(job_file, "then.toml", switched), "", lambda parts: parts.optimizer.method)
    assert made.averager._turn.then.schedule == PerEpoch(4, 4)


@pytest.mark.parametrize(
    ("words", "total"),
    [
        ("", 4),
        ("--training.epochs 3", 12),
        ("--training.steps 60", 60),
        ("--method.method.outer_schedule.total_steps 7", 7),
    ],
)
def test_the_steps_of_the_run_come_by_themselves(job_file: Path, words: str, total: int) -> None:
    """Every part that needs the number gets it, unless the job file gives one."""
    text = 'name = "streaming"\nnum_fragments = 2\nsync_delay = 1\n[method.method]\nname = "diloco"\n'
    text += "sync_every = 2\n[method.method.outer_schedule]\nname = 'pier'\n"
    file = with_method(job_file, "outer.toml", text)
    (made,) = on_ranks(file, words, lambda parts: parts.optimizer.method)
    assert made.averager.how.schedule.total_steps == total


def test_a_block_may_be_an_epoch(job_file: Path) -> None:
    text = 'name = "adacomm"\ninitial_sync_every = 9\nadapt_every = { epoch = 2 }\n'
    (made,) = on_ranks(with_method(job_file, "adacomm.toml", text), "", lambda parts: parts.optimizer.method)
    assert (made.schedule.I_0, made.schedule.block) == (9, 8)


@pytest.fixture(scope="module")
def diloco(job_file: Path) -> Path:
    outer = 'outer = { name = "SGD", lr = 0.7, momentum = 0.9, nesterov = true }\n'
    return with_method(job_file, "diloco.toml", 'name = "diloco"\nsync_every = 4\n' + outer)


def test_an_optimizer_of_the_method_itself(diloco: Path) -> None:
    def outer(parts: TrainingSetup) -> optim.Optimizer:
        assert isinstance(parts.optimizer.method.averager, OuterOptimizer)
        return parts.optimizer.method.averager.make_optimizer([torch.ones(2)])

    (made,) = on_ranks(diloco, "", outer)
    assert isinstance(made, optim.SGD)
    assert {"lr": 0.7, "momentum": 0.9, "nesterov": True}.items() <= made.param_groups[0].items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method.outer.name SDG", r"\[method\] outer name: no 'SDG'; did you mean 'SGD'"),
        (
            "--method.outer.momentun 1",
            r"\[method\] outer: SGD has no argument 'momentun'; did you mean 'momentum'",
        ),
        ("--method.outer.lr -1.0", r"\[method\]: outer: SGD: Invalid learning rate: -1.0"),
        ("--method.outer {name='LBFGS'}", r"\[method\]: outer: step\(\) of its LBFGS fails: .*closure"),
        ("--method.outer 3", r"\[method\] outer = 3: expected a name, or a table with it; Allowed: ASGD, "),
        (
            f"--method.outer {{name='{HERE}:net',start=0.5}}",
            r"\[method\] outer: net has no argument 'start'",
        ),
        (f"--method.outer {{name='{HERE}:flat',lr=1}}", r"\[method\] outer: flat takes fewer than"),
    ],
)
def test_outer_optimizers_that_are_refused(diloco: Path, words: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        on_ranks(diloco, words, lambda parts: None)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def switching(job_file: Path) -> Path:
    method = 'name = "switch"\nfirst = { name = "bsp" }\nthen = { name = "sgp", graph = "ring" }\nat = 7\n'
    return with_method(job_file, "switching.toml", method)


@pytest.mark.parametrize(("words", "steps"), [("", 7), ("--method.at {epoch=3}", 12)])
def test_a_method_and_then_another(switching: Path, words: str, steps: int) -> None:
    (made,) = on_ranks(switching, words, lambda parts: parts.optimizer.method)
    assert (made.averager._turn.at, made.averager._turn.then.averager.graph) == (steps, Ring())


@pytest.mark.parametrize(
    ("given", "graph"),
    [
        ("", Exponential(1)),
        ("peers = 2", Exponential(2)),
        ('graph = "exponential"', Exponential(1)),
        ('graph = { name = "powers_of_two", per_step = 2 }', PowersOfTwo(2)),
    ],
)
def test_who_gossips_with_whom(job_file: Path, given: str, graph: Graph) -> None:
    """Both readings of "two peers" have a name; the default one needs none."""
    file = with_method(job_file, "gossip.toml", f'name = "sgp"\n{given}\n')
    (made,) = on_ranks(file, "", lambda parts: parts.optimizer.method)
    assert made.averager.graph == graph


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method.first.name bps", r"\[method\] first name: no 'bps'; did you mean 'bsp'"),
        ("--method.at {epoch=1.5}", r"\[method\]: switch: at = {'epoch': 1.5}: expected a whole number"),
        ("--method.then.graph rings", r"\[method\] then graph: no 'rings'; did you mean 'ring'"),
        ("--method.then.sync_every 3", r"\[method\] then: sgp has no argument 'sync_every'"),
    ],
)
def test_switches_that_are_refused(switching: Path, words: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        on_ranks(switching, words, lambda parts: None)


@pytest.mark.parametrize(
    ("n", "P", "batch", "steps"),
    [(1, 1, 16, 4), (2, 1, 8, 4), (2, 2, 16, 2), (4, 2, 8, 2), (4, 1, 4, 3), (4, 4, 16, 1)],
)
def test_the_batch_is_that_of_a_group(job_file: Path, n: int, P: int, batch: int, steps: int) -> None:
    """Each rank has `batch` samples in each of `steps` steps, except that the last one takes the rest."""

    def counts(parts: TrainingSetup) -> tuple[list[int], int]:
        return [len(y) for _, y in parts.loader], parts.steps_per_epoch

    left = TRAIN // n - batch * (steps - 1)
    assert on_ranks(job_file, "", counts, n=n, P=P) == [([batch] * (steps - 1) + [left], steps)] * n


@pytest.mark.parametrize(
    ("rule", "P", "K", "factor"),
    [
        ("none", 4, 1, 1.0),
        ("linear", 4, 1, 4.0),
        ("root", 4, 1, 2.0),
        ("none", 2, 2, 1.0),
        ("linear", 2, 2, 2.0),
        ("root", 2, 2, 2**0.5),
        ("linear", 3, 2, 3.0),
        ("linear", 1, 4, 1.0),
        ("root", 1, 4, 1.0),
    ],
)
def test_the_learning_rate_grows_with_the_groups(
    job_file: Path, rule: str, P: int, K: int, factor: float
) -> None:
    """The number of ranks does not matter, because K ranks share a batch.

    The warm-up begins at one group's rate, or near 0.
    """
    words = f"--lr_schedule.scaling {rule} --lr_schedule.warmup_epochs 3"

    def rates(parts: TrainingSetup) -> tuple[float, float, int]:
        lr = parts.optimizer.param_groups[0]["lr"]
        return lr, lr * parts.warm_up.factor(), parts.warm_up.steps

    per_epoch = -(-(TRAIN // (P * K)) // (16 // K))
    for full, first, steps in on_ranks(job_file, words, rates, n=P * K, P=P):
        of_one_group = 0.1 if rule != "none" else 0.1 / steps
        assert (full, first, steps) == (
            pytest.approx(0.1 * factor),
            pytest.approx(of_one_group),
            3 * per_epoch,
        )


def test_all_ranks_start_alike_and_then_take_their_own_chances(job_file: Path) -> None:
    def start(parts: TrainingSetup) -> tuple[list[float], float]:
        weights = torch.cat([p.detach().flatten() for p in parts.model.parameters()])
        return weights.tolist(), torch.rand((), generator=parts.generator).item()

    starts = on_ranks(job_file, "", start, n=4)
    assert len({tuple(weights) for weights, _ in starts}) == 1
    assert len({chance for _, chance in starts}) == 4


@pytest.mark.parametrize("seed", [1, 2])
def test_the_seed_decides_about_everything(job_file: Path, seed: int) -> None:
    def everything(parts: TrainingSetup) -> tuple[list[float], list[int], float]:
        weights = torch.cat([p.detach().flatten() for p in parts.model.parameters()])
        chance = torch.rand((), generator=parts.generator).item()
        return weights.tolist(), list(parts.sampler), chance

    (one,) = on_ranks(job_file, "--seed 1", everything)
    (other,) = on_ranks(job_file, f"--seed {seed}", everything)
    assert [a == b for a, b in zip(one, other, strict=True)] == [seed == 1] * 3


def test_trying_the_model_leaves_no_trace(job_file: Path) -> None:
    """It changes neither the model's statistics nor the state of a random generator."""

    def found(parts: TrainingSetup) -> tuple[int, bool, float]:
        norm = next(m for m in parts.model.modules() if isinstance(m, nn.BatchNorm1d))
        return int(norm.num_batches_tracked or 0), parts.model.training, torch.rand(()).item()

    words = f"--model.name {HERE}:normalizing --model.arguments {{}}"
    (batches, training, chance), = on_ranks(job_file, words, found)  # fmt: skip
    assert (batches, training) == (0, True)
    assert chance == torch.rand((), generator=Generator().manual_seed(2)).item()


def normalizing() -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10))
    for p in layers.parameters():
        nn.init.constant_(p, 0.1)
    return layers


def pair() -> nn.Module:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    layers = Pair()
    layers.weight = nn.Parameter(torch.zeros(1))
    return layers


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"--model.name {HERE}:pair --model.arguments {{}}", "pair gives a tuple, expected a tensor"),
        (f"--model.name {HERE}:flat --model.arguments {{}}", r"scores of shape \[2, 1, 6, 10\] for 2"),
        (f"--optimizer.name {HERE}:rate", r"\[optimizer\] name: .* returned float, expected Optimizer"),
        (f"--lr_schedule.name {HERE}:rate", r"\[lr_schedule.arguments\]: rate needs 'lr'; given: none"),
        ("--lr_schedule.name ReduceLROnPlateau", "ReduceLROnPlateau goes by results"),
        ("--optimizer.name LBFGS", "LBFGS evaluates the loss several times a step"),
        (
            "--method.optimizer_state forgotten",
            r"\[method\] optimizer_state: no 'forgotten'; Allowed: average, keep, reset",
        ),
        (
            "--method.grad_reduce [1]",
            r"grad_reduce = \[1\]: expected a name, .* Allowed: alltoall, ",
        ),
    ],
)
def test_what_does_not_fit_is_refused(job_file: Path, words: str, message: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        on_ranks(job_file, words, lambda parts: None)
    assert "\n" not in str(caught.value)
