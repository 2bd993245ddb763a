"""Plans of job files with FSDP models (`[parallel] fsdp`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from hpcsgd.cli import main
from hpcsgd.config.schema import load, unsharded
from hpcsgd.cost.link_classes import LinkClass
from hpcsgd.cost.machine import Machine
from hpcsgd.cost.price import StepCost, computed, price
from hpcsgd.cost.traffic import BY_TORCH
from hpcsgd.errors import UserError
from hpcsgd.performance.planning.candidates import Option
from hpcsgd.performance.planning.estimate import Estimate, estimate
from hpcsgd.train.predicted import predicted
from hpcsgd.train.reduce_settings import DENSE, left_open
from hpcsgd.train.training_profile import TrainingProfile, profile_of
from performance.planning.plans import JOB, MACHINE, machine_of
from train.launches import make_store

GPT = 'name = "gpt"\narguments = { types = 50, width = 32, layers = 6, heads = 2 }'
SHARDED = JOB.replace('name = "mlp"\narguments = { inputs = 64, hidden = [512], classes = 10 }', GPT).replace(
    "group_size = 4", "group_size = 4\nfsdp = true"
)


WAY = LinkClass(4, 1, 1)
"""A group with a host of its own."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(SHARDED)
    (tmp_path / "machine.toml").write_text(MACHINE)
    return tmp_path / "job.toml"


@pytest.fixture
def subject(job: Path) -> TrainingProfile:
    return profile_of(load(job), samples=64_000)


def whole(subject: TrainingProfile) -> TrainingProfile:
    return profile_of(unsharded(subject.config), samples=64_000)


def on_device(machine: Machine) -> Machine:
    return replace(machine, machine=replace(machine.machine, device="cuda"))


def made(
    subject: TrainingProfile, machine: Machine, P: int = 4, K: int = 4, name: str = "hierarchical"
) -> Estimate:
    table = {"name": name, **({"sync_every": 4} if name == "hierarchical" else {})}
    return estimate(subject, machine, Option(table), P, K, sync_rate=None, alone=1.0)


def test_the_model_is_not_built(subject: TrainingProfile) -> None:
    assert {p.device.type for p in subject.model.parameters()} == {"meta"}
    assert subject.optimizer_state == {"momentum_buffer": set(subject.model.parameters())}
    assert subject.M == whole(subject).M


def test_memory_is_a_kth_and_one_block(subject: TrainingProfile) -> None:
    """A rank holds 1/K of w, g and momentum, and in full one of the six layers and the rest of the model."""
    K, M = 4, subject.M
    blocks = [sum(p.numel() for p in block.parameters()) for block in layers(subject.model)]
    assert len(blocks) == 6
    e = made(subject, machine_of(), K=K)
    assert e.memory == pytest.approx(4 * (3 * M / K + max(blocks) + M - sum(blocks)), rel=0.02)
    assert e.memory < 0.6 * made(whole(subject), machine_of(), K=K).memory


def layers(model: nn.Module) -> nn.ModuleList:
    found = model.get_submodule("blocks")
    assert isinstance(found, nn.ModuleList)
    return found


def test_torchs_messages_are_paid_for_and_kept_apart(subject: TrainingProfile) -> None:
    on_cpu, beside = (made(subject, machine).step for machine in (machine_of(), on_device(machine_of())))
    ours = made(whole(subject), machine_of()).step
    assert on_cpu.phases[BY_TORCH] > 0
    assert on_cpu.phases.get("grad_reduce", 0.0) + on_cpu.phases.get("param_gather", 0.0) < 1e-12
    assert on_cpu.by_torch > ours.nbytes - on_cpu.nbytes > 0, "weights travel twice, gradients once"
    assert on_cpu.nbytes == pytest.approx(made(subject, machine_of(), name="bsp").step.nbytes / 4, rel=0.02)
    assert on_cpu.phases["compute"] == pytest.approx(beside.phases["compute"])
    assert 0 < beside.phases[BY_TORCH] < on_cpu.phases[BY_TORCH]
    assert beside.hidden == pytest.approx(on_cpu.phases[BY_TORCH] - beside.phases[BY_TORCH])


def test_muon_pays_for_whole_matrices_in_each_period(subject: TrainingProfile) -> None:
    def planned(**arguments: int) -> Estimate:
        muon = replace(subject.config.optimizer, name="Muon", arguments=arguments)
        return made(profile_of(replace(subject.config, optimizer=muon), samples=64_000), machine_of())

    always, seldom, sgd = planned(), planned(period=4), made(subject, machine_of())
    assert always.step.phases["muon"] == pytest.approx(4 * seldom.step.phases["muon"])
    assert always.step.nbytes - sgd.step.nbytes == pytest.approx(4 * (seldom.step.nbytes - sgd.step.nbytes))
    assert always.memory == seldom.memory


def test_what_is_not_hidden_behind_neighbours(subject: TrainingProfile) -> None:
    """If computing takes no time, nothing is hidden.

    If it takes long, all is hidden except the first gather of either pass and the last gradients.
    """
    plan = subject.plan(subject.own_method(4))
    m = subject.sizes(4, 4, 4, plan)
    machine = on_device(machine_of())
    own = computed(plan, m, machine.compute or pytest.fail("none"), 16)

    def step(factor: float) -> StepCost:
        return price(plan, m, machine, own.times(factor))

    everything = made(subject, machine_of()).step.phases[BY_TORCH]
    assert step(0.0).phases[BY_TORCH] == pytest.approx(everything)
    outside, block = m.units[-1], m.units[0]
    first = [("allgather", outside.weights), ("allgather", block.weights)]
    last = ("reduce_scatter", outside.gradients)
    at_least = sum(machine.seconds(operation, nbytes, WAY) for operation, nbytes in [*first, last])
    assert step(1e3).phases[BY_TORCH] == pytest.approx(at_least)


def test_nothing_is_chosen_that_torch_does(subject: TrainingProfile, job: Path) -> None:
    job.write_text(SHARDED.replace('[method.grad_reduce]\nname = "reduce_scatter"\n', ""))
    config = load(job)
    assert left_open(config, 4).grad_reduces == (None,)
    assert left_open(unsharded(config), 4).grad_reduces == DENSE


def test_what_cannot_be_is_left_out(subject: TrainingProfile) -> None:
    with pytest.raises(UserError, match="Sparse: torch shards the parameters"):
        sparsifier = {"name": "topk", "density": 0.1}
        method = {
            "name": "hierarchical",
            "sync_every": 4,
            "grad_reduce": {"name": "sparse", "sparsifier": sparsifier},
        }
        estimate(subject, machine_of(), Option(method), 4, 4, sync_rate=None, alone=1.0)
    muon = replace(subject.config.optimizer, name="Adafactor", arguments={})
    with pytest.raises(UserError, match="not known to update every element by itself"):
        made(profile_of(replace(subject.config, optimizer=muon), samples=64_000), machine_of())
    blocks = replace(subject.config.model, fsdp_units=("block.*",))
    with pytest.raises(UserError, match=r"\[model\]: units: no module 'block\.\*'"):
        made(profile_of(replace(subject.config, model=blocks), samples=64_000), machine_of())


def test_typed(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    (job.parent / "machine.toml").write_text(MACHINE.replace("2e-11", "2e-9"))
    words = ["--samples", "64000", "--ranks", "16", "--methods", "bsp,hierarchical"]
    main(["plan", "job.toml", "--machine", "machine.toml", *words])
    assert "left out" not in capsys.readouterr().out
    rows = json.loads((job.parent / "runs" / "job-plan" / "plan.json").read_text())["rows"]
    assert len(rows) == 2 * 5
    for row in rows:
        assert (row["bytes_by_torch_per_rank_and_step"] > 0) == (row["group_size"] > 1)
        assert ("by torch" in row["seconds_per_phase"]) == (row["group_size"] > 1)


def test_predicted(job: Path) -> None:
    make_store(job.parent / "nowhere.h5", train=400)
    found = predicted(load(job), 4, 4, job.parent / "machine.toml", 4)
    assert {sending.grad_reduce for sending in found} == {None}
