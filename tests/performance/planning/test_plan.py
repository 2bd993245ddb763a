"""Plans: the options and their costs, the choice with its reasons, and the files that are written."""

from __future__ import annotations

import copy
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import hpcsgd
import programs
from hpcsgd.cli import main
from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.core.topology import form
from hpcsgd.cost import machine as machines
from hpcsgd.errors import UserError
from hpcsgd.methods import Method, allreduce_local_sgd, bsp, ensemble_sync, hierarchical
from hpcsgd.parts.grad_reduces import Sparse
from hpcsgd.parts.sparsifiers import TopK
from hpcsgd.performance.planning.candidates import Option, options, ranks_from, shapes
from hpcsgd.performance.planning.choice import Limits, ranked
from hpcsgd.performance.planning.estimate import Estimate, one_node
from hpcsgd.performance.planning.job_file import nodes_of, write_choice
from hpcsgd.performance.planning.run import estimates
from hpcsgd.train.training_profile import TrainingProfile, profile_of, state_of
from methods.table import replica_groups
from performance.planning.plans import JOB, MACHINE


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    job, machine = tmp_path / "job.toml", tmp_path / "machine.toml"
    job.write_text(JOB)
    machine.write_text(MACHINE)
    return job, machine


@pytest.fixture
def subject(files: tuple[Path, Path]) -> TrainingProfile:
    return profile_of(load(files[0]), samples=64_000)


def made(
    files: tuple[Path, Path],
    subject: TrainingProfile,
    *names: str,
    ranks: str = "4..64",
    limit: int = 8,
    **more: Any,
) -> list[Estimate]:
    tried = options({"name": "hierarchical", "sync_every": 4}, names or None, more.get("sync_every", []))
    return estimates(subject, machines.load(files[1]), tried, ranks_from(ranks), limit)[0]


def test_ranks() -> None:
    assert ranks_from("64..500") == [64, 128, 256]
    assert ranks_from("96,64,96") == [64, 96]
    for wrong in ("9..3", "0..4", "x", "", "4,-1"):
        with pytest.raises(UserError, match=r"expected ranks, as 64\.\.4096"):
            ranks_from(wrong)


def test_shapes_are_those_whose_batches_can_be_shared() -> None:
    assert list(shapes(12, 64, None)) == [(3, 4), (6, 2), (12, 1)]
    assert list(shapes(12, 64, 4)) == [(3, 4)]
    assert list(shapes(10**15, 6, None)) == [(10**15 // 2, 2), (10**15, 1)]


def test_the_own_method_comes_first_and_keeps_its_arguments() -> None:
    found = options({"name": "hierarchical", "sync_every": 4, "optimizer_state": "reset"}, None, [2, 4])
    assert [str(each) for each in found[:3]] == [
        "hierarchical sync_every=2 optimizer_state=reset",
        "hierarchical sync_every=4 optimizer_state=reset", "bsp",
    ]  # fmt: skip
    assert Option({"name": "allreduce_local_sgd", "sync_every": 4}) in found
    with pytest.raises(UserError, match="--methods slsync: did you mean 'selsync'"):
        options({"name": "bsp"}, ["slsync"], [])
    with pytest.raises(UserError, match="--methods selsync: it needs delta"):
        options({"name": "bsp"}, ["selsync"], [])


def test_an_estimate_adds_up(files: tuple[Path, Path], subject: TrainingProfile) -> None:
    (e,) = made(files, subject, "hierarchical", ranks="32", limit=1 << 30)[-1:]
    assert e.N == 32
    assert e.nodes == 8
    assert e.steps_per_epoch == 64_000 // (64 * e.P)
    assert e.epoch_seconds == pytest.approx(e.steps_per_epoch * e.step.seconds)
    assert e.node_hours == pytest.approx(8 * 10 * e.epoch_seconds / 3600)
    assert e.efficiency == pytest.approx(
        e.P * 64 / e.step.seconds / 32 / one_node(subject, machines.load(files[1]))
    )
    assert e.step.low < e.step.seconds < e.step.high
    assert subject.optimizer_state == {"momentum_buffer": set(subject.model.parameters())}
    assert e.memory == pytest.approx(4 * subject.M * (2 + 1 / e.K + (e.K > 1)), rel=0.01)


def test_buffers_that_are_broadcast_cost_a_message(files: tuple[Path, Path]) -> None:
    def step(*words: str) -> Mapping[str, float]:
        model = ["--model.name", "resnet20", "--model.arguments", "{}"]
        found = made(files, profile_of(load(files[0], [*model, *words]), 64_000), "hierarchical", ranks="32")
        return next(e for e in found if e.K == 4).step.phases

    told = step("--training.broadcast_buffers", "true")
    assert told["buffers"] > 0
    assert {name: told[name] for name in told if name != "buffers"} == step()


@pytest.mark.parametrize(
    "method", [hierarchical(2), allreduce_local_sgd(2), bsp(Sparse(TopK(0.1))), ensemble_sync(2)]
)
@pytest.mark.parametrize("K", [1, 3])
def test_buckets_are_those_of_the_engine(files: tuple[Path, Path], method: Method, K: int) -> None:
    """Tensors that Muon needs whole are assigned to ranks that own shards, and nowhere else."""
    words = [
        "--optimizer.name",
        "Muon",
        "--optimizer.arguments",
        "{momentum=0.9}",
        "--training.bucket_cap_mb",
        "0.02",
    ]
    subject = profile_of(load(files[0], words), samples=64_000)
    form_of = replica_groups if method.averager.traits.elastic else form

    def laid_out(world: Communicator) -> list[tuple[int, int, bool]]:
        again = copy.deepcopy(subject)
        net, topology = again.model, form_of(world, 2)
        made = hpcsgd.DistributedOptimizer(
            again.optimizer, net, topology, copy.deepcopy(method), bucket_cap_mb=0.02
        )
        return [(sum(s.stop - s.start for s in b.slots), b.size, b.whole) for b in made.buckets]

    m = subject.sizes(2, K, K, subject.plan(method))
    expected = threads.run(2 * K, laid_out)[0]
    assert [(b.used, b.padded, b.whole) for b in m.buckets] == expected
    assert any(b.whole for b in m.buckets) == (
        K > 1 and method.grad_reduce.traits.leaves_shards and form_of is form
    )
    assert subject.plan(method).divides_tensors == (
        method.grad_reduce.traits.leaves_shards and form_of is form
    )


def test_complex_parameters_are_two_reals(files: tuple[Path, Path]) -> None:
    job, _ = files
    job.write_text(job.read_text().replace('name = "mlp"', 'name = "spectral:Operator"'))
    table = job.read_text().splitlines()
    job.write_text("\n".join("arguments = { pairs = false }" if "hidden" in x else x for x in table))
    subject = profile_of(load(job), samples=64_000)
    assert subject.M == 84
    assert subject.state == 1.0


def test_what_is_not_trained_has_no_state(subject: TrainingProfile) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    optimizer = optim.AdamW(model.parameters())
    moments, numbers = state_of(optimizer)
    partly = replace(subject, model=model, optimizer=optimizer, optimizer_state=moments, numbers=numbers)
    m = partly.sizes(2, 2, 2, partly.plan(hierarchical(2)))
    kept = {name: sum(m.layers[i] for i in who) for name, who in m.optimizer_state.items()}
    assert kept == {"exp_avg": 14, "exp_avg_sq": 14}
    assert partly.state == 2


@pytest.mark.parametrize(
    ("words", "epochs"),
    [([], 10.0), (["--training.steps", "500"], 1.0), (["--training.samples", "96000"], 1.5)],
)
def test_epochs_of_another_length(files: tuple[Path, Path], words: list[str], epochs: float) -> None:
    """For each of 2 groups, 500 steps of 64 samples are an epoch."""
    found = profile_of(load(files[0], words), samples=64_000)
    assert found.epochs(2) == epochs


def test_tokens_need_the_data(files: tuple[Path, Path]) -> None:
    found = profile_of(load(files[0], ["--training.tokens", "500"]), samples=64_000)
    with pytest.raises(UserError, match=r"\[training\] tokens: the number of tokens per sample is"):
        found.epochs(2)
    assert replace(found, tokens=4).epochs(2) == 500 / 256_000


def test_averaging_more_seldom_is_cheaper_and_synchronous_is_dearest(
    files: tuple[Path, Path], subject: TrainingProfile
) -> None:
    found = [
        e for e in made(files, subject, "bsp", "hierarchical", sync_every=[2, 8], ranks="64") if e.P == 8
    ]
    seconds = {str(e.option): e.step.seconds for e in found}
    assert seconds["hierarchical sync_every=8"] < seconds["hierarchical sync_every=2"] < seconds["bsp"]


AT = 1500
BOTH = {"name": "switch", "first": {"name": "bsp"}, "then": {"name": "delayed", "sync_delay": 2}}
BOTH["then"]["method"] = {"name": "diloco", "sync_every": 4}  # type: ignore[index]


def planned(files: tuple[Path, Path], subject: TrainingProfile, table: Mapping[str, Any]) -> Estimate:
    """Return the estimate on 16 ranks, in 4 groups of 4, of which 10 epochs are 2500 steps."""
    found, _ = estimates(subject, machines.load(files[1]), [Option(table)], [16], 4)
    return next(e for e in found if e.P == 4)


def test_a_switch_is_priced_by_both_methods(files: tuple[Path, Path], subject: TrainingProfile) -> None:
    first, then, both = (
        planned(files, subject, table) for table in (BOTH["first"], BOTH["then"], {**BOTH, "at": AT})
    )
    assert [stage.steps for stage in both.sequence] == [AT, 2500 - AT]
    hours = sum(stage.steps * stage.step.seconds for stage in both.sequence) / 3600
    assert both.hours == pytest.approx(hours, rel=1e-9)
    for stage, each in zip(both.sequence, (first, then), strict=True):
        assert stage.step.nbytes == each.step.nbytes
        assert stage.step.seconds == pytest.approx(each.step.seconds, rel=0.05)
    assert both.step.nbytes == pytest.approx(0.6 * first.step.nbytes + 0.4 * then.step.nbytes, rel=1e-12)
    assert both.memory == then.memory > first.memory  # gradients use the same memory


@pytest.mark.parametrize(("at", "alone"), [(0, "then"), (2500, "first"), (9999, "first")])
def test_a_switch_that_never_comes_or_at_once(
    files: tuple[Path, Path], subject: TrainingProfile, at: int, alone: str
) -> None:
    found, expected = planned(files, subject, {**BOTH, "at": at}), planned(files, subject, BOTH[alone])
    assert len(found.sequence) == 1
    assert found.step.nbytes == expected.step.nbytes
    assert found.memory == expected.memory


def test_both_methods_of_a_switch_are_shown(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, machine = files
    method = f'{{ name = "switch", first = "bsp", then = "sgp", at = {AT} }}'
    words = ["--ranks", "16", "--samples", "64000", "--run.output_dir", str(tmp_path / "run")]
    main(["plan", str(job), "--machine", str(machine), *words, "--methods", "switch,bsp", "--method", method])
    printed = capsys.readouterr().out.splitlines()
    row = next(i for i, line in enumerate(printed) if line.startswith("switch") and "4 × 4" in line)
    assert printed[row + 1].split()[:3] == ["first", "1,500", "steps"]
    assert printed[row + 2].split()[:3] == ["then", "1,000", "steps"]
    head, column = printed[0], printed[0].index("comm") + len("comm")
    assert all(line[:column].endswith("%") for line in printed[row : row + 3])
    assert head[:column].endswith("comm")
    rows = json.loads((tmp_path / "run-plan" / "plan.json").read_text())["rows"]
    told, other = (
        next(each for each in rows if each["method"]["name"] == name and each["groups"] == 4)
        for name in ("switch", "bsp")
    )
    assert other["stages"] == []
    assert [stage["steps"] for stage in told["stages"]] == [1500, 1000]
    seconds = [stage["step_seconds"] for stage in told["stages"]]
    assert told["step_seconds"] == pytest.approx(0.6 * seconds[0] + 0.4 * seconds[1])


def test_a_change_that_nobody_can_tell_is_left_out_with_the_reason(
    files: tuple[Path, Path], subject: TrainingProfile
) -> None:
    tried = [Option({"name": name, "sync_every": 4}) for name in ("post_local", "hierarchical")]
    found, left_out = estimates(subject, machines.load(files[1]), tried, [16], 4)
    assert {e.option.name for e in found} == {"hierarchical"}
    assert "it is not known when this method switches" in left_out["post_local sync_every=4"]


ENOUGH = ["--method.name", "ensemble_sync", "--method.quorum", "3", "--method.grace_s", "2", "--methods"]


def test_fewer_groups_than_the_quorum_are_left_out_with_the_reason(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, machine = files
    job.write_text(job.read_text().replace('[method.grad_reduce]\nname = "reduce_scatter"\n', ""))
    usual = ["plan", str(job), "--machine", str(machine), "--ranks", "8,16", "--samples", "64000"]
    words = [*usual, "--run.output_dir", str(tmp_path / "run"), *ENOUGH]
    main([*words, "ensemble_sync,bsp"])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    name = "ensemble_sync sync_every=4 quorum=3 grace_s=2"
    assert told == [
        f"left out: {name} with fewer than 3 groups: quorum = 3: expected at most the number of groups"
    ]
    rows = json.loads((tmp_path / "run-plan" / "plan.json").read_text())["rows"]
    groups = {
        which: {row["groups"] for row in rows if row["method"]["name"] == which}
        for which in ("bsp", "ensemble_sync")
    }
    assert groups == {"bsp": {1, 2, 4, 8, 16}, "ensemble_sync": {4, 8, 16}}
    (probe := tmp_path / "probe.json").write_text('{"P": 2}')
    with pytest.raises(SystemExit):
        main([*words, "ensemble_sync", "--probe", str(probe)])
    refused = capsys.readouterr().err
    assert f"{name} with fewer than 3 groups: quorum = 3: expected at most" in refused
    assert refused.count("\n") == 1


def test_choice(files: tuple[Path, Path], subject: TrainingProfile) -> None:
    found = made(files, subject)
    fastest, cheapest = min(found, key=lambda e: e.hours), min(found, key=lambda e: e.node_hours)
    best, why = ranked(found, Limits())
    assert best[0].efficiency >= 0.5
    assert "50% or more" in why
    assert len(best) == len(found)
    best, why = ranked(found, Limits(deadline=1.01 * fastest.hours))
    assert best[0].hours <= 1.01 * fastest.hours
    assert "the fewest node hours" in why
    best, why = ranked(found, Limits(budget=1.01 * cheapest.node_hours))
    assert best[0].node_hours <= 1.01 * cheapest.node_hours
    assert "the fastest within" in why
    with pytest.raises(UserError, match=r"none of .* ways to run it; the fastest"):
        ranked(found, Limits(deadline=0.5 * fastest.hours))
    with pytest.raises(UserError, match="--budget 0: more than 0"):
        Limits(budget=0)


def test_nobody_changes_the_method_for_next_to_nothing(
    files: tuple[Path, Path], subject: TrainingProfile
) -> None:
    """On one host all methods cost about the same."""
    found = made(files, subject, "bsp", "hierarchical", "sgp", ranks="4")
    for own in ("bsp", "hierarchical", "sgp"):
        best, _ = ranked(found, Limits(), own)
        assert best[0].option.name == own


def test_the_choice_is_written_and_all_else_stays(files: tuple[Path, Path]) -> None:
    job, _ = files
    before = tomllib.loads(JOB)
    write_choice(job, 8, {"name": "sgp", "graph": {"name": "ring"}})
    text = job.read_text()
    after = tomllib.loads(text)
    assert after["parallel"] == {"groups": 8, "timeout_s": 60.0}
    assert after["method"] == {"name": "sgp", "graph": {"name": "ring"}}
    kept = before.keys() - {"parallel", "method"}
    assert {key: after[key] for key in kept} == {key: before[key] for key in kept}
    assert all(comment in text for comment in ("# of ours", "# of a group", "# the rest"))
    write_choice(job, 2, {"name": "bsp"})
    assert tomllib.loads(job.read_text())["method"] == {"name": "bsp"}


def test_the_choice_is_written_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("# für uns\n", encoding="utf-8")
    code = (
        "import pathlib, sys; from hpcsgd.performance.planning.job_file import write_choice; "
        "write_choice(pathlib.Path(sys.argv[1]), 2, {'name': 'bsp'})"
    )
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    programs.run([sys.executable, "-c", code, str(job)], env={**os.environ, **plain})
    assert job.read_text(encoding="utf-8").startswith("# für uns\n")


def test_a_job_file_without_sections_is_left_alone(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(text := 'method = { name = "bsp" }\n[data]\ngroup_batch_size = 4\n')
    with pytest.raises(UserError, match="set groups = 2 and sgp there yourself"):
        write_choice(job, 2, {"name": "sgp"})
    assert job.read_text() == text


def test_the_command(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, machine = files
    probe = tmp_path / "probe.json"
    probe.write_text('{"P": 4}')
    main(
        ["plan", str(job), "--machine", str(machine), "--probe", str(probe), "--ranks", "4..64",
         "--samples", "64000", "--run.output_dir", str(tmp_path / "run"), "--write"]
    )  # fmt: skip
    printed = capsys.readouterr().out
    plan = json.loads((tmp_path / "run-plan" / "plan.json").read_text())
    choice = plan["choice"]
    assert f"recommended: {choice['label']} in {choice['groups']} groups" in printed
    assert {row["groups"] for row in plan["rows"]} <= {1, 2, 3, 4}
    assert max(row["ranks"] for row in plan["rows"]) == 64
    assert (tmp_path / "run-plan" / "plan.png").read_bytes().startswith(b"\x89PNG")
    written = tomllib.loads(job.read_text())
    assert written["parallel"]["groups"] == choice["groups"]
    assert written["method"] == choice["method"]


def test_a_plan_is_for_the_job_that_it_recommends(files: tuple[Path, Path]) -> None:
    job, _ = files
    plan = job.with_name("plan.json")
    choice = {"nodes": 4, "ranks": 16, "groups": 2, "method": {"name": "sgp"}, "label": "sgp"}
    plan.write_text(json.dumps({"choice": choice}))
    with pytest.raises(UserError, match="the plan is for 2 groups and sgp: put it there with hpcsgd plan"):
        nodes_of(plan, job, [])
    write_choice(job, 2, {"name": "sgp"})
    assert nodes_of(plan, job, []) == (4, 4)
    plan.write_text("{}")
    with pytest.raises(UserError, match=r"not the plan\.json of hpcsgd plan"):
        nodes_of(plan, job, [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "7"], "--ranks 7: the machine has 4 ranks a node"),
        (["--ranks", "64", "--probe", "PROBE"], "not the probe.json of a probe"),
        (["--sync-rate", "2"], "--sync-rate 2: expected the share of steps"),
        (["--sync-every", "0"], "--sync-every 0: at least 1 step"),
        (["--samples", "0"], "--samples 0: at least 1 is needed"),
        (["--samples", "10"], "10 samples are not one batch of 64"),
        (["--methods", "selsync", "--method.name", "selsync"], "[method]"),
        (["--runs", "RUN"], "not the folder of a run that was trained"),
        (["--machine", "NOWHERE"], "NOWHERE"),
    ],
)
def test_bad_input_is_one_line(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    job, machine = files
    usual = {"--machine": str(machine), "--ranks": "4", "--samples": "64000"}
    rest = [word for flag, value in usual.items() if flag not in words for word in (flag, value)]
    with pytest.raises(SystemExit) as left:
        main(["plan", str(job), *rest, "--run.output_dir", str(job.parent / "run"), *words])
    assert left.value.code == 1
    complaint = capsys.readouterr().err
    assert told in complaint
    assert complaint.count("\n") == 1
    assert job.read_text() == JOB
