"""`hpcsgd compare`: variants begin with the same weights, and an interruption does not change the results."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsgd.comm import Communicator, threads
from hpcsgd.config.schema import load
from hpcsgd.config.variants import configs
from hpcsgd.errors import JobError, UserError
from hpcsgd.performance import comparing
from train.interruptions import assert_same_outcome, outcome, without_pictures
from train.launches import JOB, launch, make_store

STEADY = ("--model.name", "train.small:steady", "--model.arguments", "{ inputs = 36, norm = false }")
TWO_GROUPS = ("--parallel.groups", "2", "--training.epochs", "2", *STEADY)
PER_VARIANT = 4  # steps


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    without_pictures(monkeypatch)
    monkeypatch.setattr("hpcsgd.performance.comparing._show", lambda *_: None)
    nothing = SimpleNamespace(collect=lambda: None)  # garbage collection takes longer than these runs, too
    monkeypatch.setattr("hpcsgd.performance.comparing.gc", nothing)
    a_run = importlib.import_module("hpcsgd.train.run")  # the package has a function of that name
    monkeypatch.setattr(a_run, "Stopping", Stopping)
    return tmp_path / "job.toml"


class After:
    """A replacement of `Reasons` that stops after a number of steps of all variants together."""

    def __init__(self, steps: int, threads_before: frozenset[threading.Thread]) -> None:
        self.left = steps
        self.servers = 0
        """The most threads at once that answered other ranks of this comparison."""
        self.threads_before = threads_before
        """Threads of earlier tests in this process, which may not have ended yet."""

    def count_servers(self) -> None:
        started = set(threading.enumerate()) - self.threads_before
        self.servers = max(self.servers, sum("server of" in thread.name for thread in started))


class Stopping:
    """A replacement of the class that asks the other ranks."""

    def __init__(self, reasons: After, _: Communicator) -> None:
        self._reasons = reasons

    def now(self) -> str | None:
        r = self._reasons
        r.left -= 1
        r.count_servers()
        return "enough" if r.left == 0 else None

    def at_once(self) -> str | None:
        return None


def compare(
    job_file: Path,
    folder: Path,
    methods: str,
    *options: str,
    n: int = 2,
    after: int = 0,
    resume: bool = False,
) -> tuple[set[str | None], int]:
    """Return the reasons for which the ranks stopped, and the most threads that answered others."""

    before = frozenset(threading.enumerate())

    def one(world: Communicator) -> tuple[str | None, int]:
        words = [*options, "--run.output_dir", str(folder)]
        chosen = configs(job_file, words, methods)
        reasons: Any = After(after, before)
        return comparing.compare(world, job_file, chosen, reasons, resume=resume), reasons.servers

    ended = threads.run(n, one)
    return {reason for reason, _ in ended}, max(servers for _, servers in ended)


def variant(folder: Path, label: str) -> Path:
    return folder.with_name(f"{folder.name}-compare") / label


def told(folder: Path) -> dict[str, Any]:
    return json.loads((variant(folder, "compare.json")).read_text())


def losses(folder: Path, label: str) -> list[float]:
    return [record["loss"] for record in outcome(variant(folder, label))[1] if record["kind"] == "step"]


def files(folder: Path) -> dict[Path, tuple[bytes, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_alike_under_two_labels(job_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bits are equal even with another variant between them."""
    method = 'method = { name = "hierarchical", sync_every = 2 }'
    text = f"[one]\n{method}\n[between]\nmethod.name = 'bsp'\n[other]\n{method}\n"
    (tmp_path / "methods.toml").write_text(text)
    caplog.set_level("INFO", "hpcsgd")
    ended = compare(job_file, tmp_path / "run", "methods.toml", *TWO_GROUPS)
    assert ended == ({None}, 0)
    headings = {f"\n{label} ({i} of 3)" for i, label in enumerate(("one", "between", "other"), start=1)}
    assert headings < set(caplog.messages)
    one, between, other = (variant(tmp_path / "run", label) for label in ("one", "between", "other"))
    assert_same_outcome(one, other)
    with pytest.raises(AssertionError):
        assert_same_outcome(one, between)
    assert [row["complete"] for row in told(tmp_path / "run")["variants"]] == [True] * 3


@pytest.mark.slow
def test_all_begin_with_the_same_weights_and_see_the_same_samples(job_file: Path, tmp_path: Path) -> None:
    """At a rate that moves no weight the losses are equal in every step, at another rate in the first."""
    methods, labels = "bsp, ssp max_staleness=1, async_sgd", ("bsp", "ssp-max_staleness=1", "async_sgd")
    _, servers = compare(job_file, tmp_path / "still", methods, *TWO_GROUPS, "--optimizer.lr", "1e-30")
    first, *others = (losses(tmp_path / "still", label) for label in labels)
    assert len(set(first)) == len(first) == PER_VARIANT
    for found in others:
        assert found == pytest.approx(first, rel=1e-6)
    assert servers == 2  # two ranks have one each: no thread of ssp is left while async_sgd is trained
    compare(job_file, tmp_path / "moving", "bsp", *TWO_GROUPS)
    one = losses(tmp_path / "moving", "bsp")
    assert one[0] == first[0]
    assert one[1:] != first[1:]


@pytest.mark.slow
def test_it_goes_on(job_file: Path, tmp_path: Path) -> None:
    """A comparison stopped in the first variant, then in the second, continues.

    Complete variants stay as they are, even if another variant is added.
    """
    methods = "bsp, hierarchical sync_every=3"
    whole, other = tmp_path / "whole", tmp_path / "other"
    compare(job_file, whole, methods, *TWO_GROUPS)
    assert compare(job_file, other, methods, *TWO_GROUPS, after=PER_VARIANT - 1)[0] == {"enough"}
    assert [row["complete"] for row in told(other)["variants"]] == [False]
    assert compare(job_file, other, methods, *TWO_GROUPS, after=4, resume=True)[0] == {"enough"}
    assert [(row["complete"], row["steps"]) for row in told(other)["variants"]] == [(True, 4), (False, 3)]
    bsp, hierarchical = variant(other, "bsp"), variant(other, "hierarchical-sync_every=3")
    before = files(bsp)
    assert compare(job_file, other, methods, *TWO_GROUPS, resume=True)[0] == {None}
    assert files(bsp) == before
    for found in (bsp, hierarchical):
        assert_same_outcome(found, variant(whole, found.name))
    before |= files(hierarchical)
    compare(job_file, other, f"{methods}, sgp", *TWO_GROUPS, resume=True)
    assert files(bsp) | files(hierarchical) == before
    assert [row["complete"] for row in told(other)["variants"]] == [True, True, True]


def test_groups_of_a_variant_and_samples_of_all(job_file: Path, tmp_path: Path) -> None:
    """An epoch has 48 samples in the same order, for two groups with halves of a batch and for one group."""
    methods = "bsp parallel.groups=1 data.group_batch_size=32, bsp, bsp parallel.groups=1"
    still = ("--training.samples", "80", "--optimizer.lr", "1e-30")
    compare(job_file, tmp_path / "run", methods, *TWO_GROUPS, *still)
    found = [(row["P"], row["K"], row["steps"], row["samples"]) for row in told(tmp_path / "run")["variants"]]
    assert found == [(1, 2, 3, 80), (2, 1, 3, 80), (1, 2, 5, 80)]
    one = losses(tmp_path / "run", "bsp-parallel.groups=1-data.group_batch_size=32")
    assert losses(tmp_path / "run", "bsp") == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    ("methods", "options", "line"),
    [
        ("bsp, hierachical", (), r"^variant 'hierachical': .*job.toml: .*did you mean 'hierarchical'"),
        (
            "bsp, hierarchical sync_evry=8",
            (),
            r"^variant 'hierarchical sync_evry=8': .*\[method\].* 'sync_every'",
        ),
        (
            "bsp, ensemble_sync sync_every=8",
            (),
            r"^variant 'ensemble_sync sync_every=8': method ensemble_sync is for groups that are",
        ),
        (
            "bsp, bsp parallel.groups=2",
            (),
            r"^variant 'bsp parallel.groups=2': .*\[parallel\]: groups = 2 is more than",
        ),
        ("bsp, bsp", (), "is there already"),
        ("bsp", ("--training.steps", "1", "--training.samples", "2"), "give one of them, not both"),
    ],
)
def test_mistakes_come_at_once(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: str, options: tuple[str, ...],
    line: str,
) -> None:  # fmt: skip
    """The error has one line and comes before the first variant is trained."""
    monkeypatch.setenv("PMI_SIZE", "1")  # started by a launcher, on one rank
    with pytest.raises(UserError, match=line) as raised:
        compare(job_file, tmp_path / "run", methods, *options, n=1)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run-compare").exists()


def test_what_goes_on_has_to_be_the_same(job_file: Path, tmp_path: Path) -> None:
    run = Path("run")
    compare(job_file, run, "bsp", *STEADY, n=1)
    with pytest.raises(JobError, match=r"run-compare: holds a run: pass --resume"):
        compare(job_file, run, "bsp", *STEADY, n=1)
    with pytest.raises(
        JobError, match=r"run-compare/bsp: was begun otherwise: training.epochs 1 → 2: choose"
    ):
        compare(job_file, run, "bsp", *STEADY, "--training.epochs", "2", n=1, resume=True)
    with pytest.raises(JobError, match="was begun on 1 rank, and here are 2"):
        compare(job_file, run, "bsp", *STEADY, n=2, resume=True)
    compare(job_file, run.absolute(), "bsp", *STEADY, "--training.time_limit_s", "9", n=1, resume=True)


@pytest.mark.slow
def test_what_a_variant_chose_is_no_other_beginning(job_file: Path, tmp_path: Path) -> None:
    """The gradient reduction that it chose is in its own job file, and not in the common one."""
    said = ("--training.bucket_cap_mb", "1", "--training.overlap_grad_reduce", "true", *STEADY)
    words = ("--parallel.groups", "1", "--training.autotune_steps", "1", *said)
    compare(job_file, tmp_path / "run", "bsp", *words)
    before = (variant(tmp_path / "run", "bsp") / "job.toml").read_text()
    assert "grad_reduce" in before
    assert compare(job_file, tmp_path / "run", "bsp", *words, resume=True)[0] == {None}
    with pytest.raises(JobError, match=r"was begun otherwise: method.grad_reduce"):
        compare(job_file, tmp_path / "run", "bsp", "--parallel.groups", "1", *said, resume=True)


def test_ranks_count_before_anything_is_complete(job_file: Path, tmp_path: Path) -> None:
    """This is the case if the first variant was killed."""
    with pytest.raises(UserError, match="the loss is nan"):
        compare(job_file, tmp_path / "run", "bsp", *STEADY, "--optimizer.lr", "1e30", n=1)
    with pytest.raises(JobError, match="was begun on 1 rank, and here are 2"):
        compare(job_file, tmp_path / "run", "bsp", *STEADY, "--optimizer.lr", "1e30", n=2, resume=True)


def test_the_variant_that_fails_is_named(job_file: Path, tmp_path: Path) -> None:
    methods = "bsp, sgp optimizer.lr=1e30"
    with pytest.raises(UserError, match=r"^variant 'sgp optimizer.lr=1e30': the loss is nan at step 2"):
        compare(job_file, tmp_path / "run", methods, *STEADY, n=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_asks_the_scheduler(job_file: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """It is asked for the end of the batch job. All ranks would ask it at the same time."""
    asked: list[bool] = []
    monkeypatch.setattr(comparing, "join_world", lambda read: (SimpleNamespace(rank=rank), read()))
    monkeypatch.setattr(comparing, "Reasons", lambda *_, asks_scheduler: asked.append(asks_scheduler))
    for name in ("log_to_stdout", "keep_freed_memory", "compare"):
        monkeypatch.setattr(comparing, name, lambda *_, **__: None)
    comparing.run(job_file, lambda: {"bsp": load(job_file)}, None, resume=False)
    assert asked == [rank == 0]


@pytest.mark.slow
def test_as_users_start_it(tmp_path: Path) -> None:
    """The time limit stops it with the code of a run that can continue, and a resumed run reaches the end."""
    make_store(tmp_path / "small.h5")
    (tmp_path / "job.toml").write_text(JOB)
    words = (
        "compare",
        "job.toml",
        "--methods",
        "ssp max_staleness=1, hierarchical sync_every=2",
        "--parallel.groups",
        "2",
    )
    stopped = launch(tmp_path, *words, "--training.time_limit_s", "0.001", n=2)
    assert (stopped.code, stopped.messages) == (75, [])
    assert "time limit reached: saved step 2, go on with --resume" in stopped.out
    assert "ssp max_staleness=1 (unfinished)  2 × 1      2" in stopped.out
    done = launch(tmp_path, *words, "--target", "0.01", "--resume", n=2)
    assert (done.code, done.err) == (0, "")
    assert "resuming at step 2 from a checkpoint" in done.out
    *_, head, first, second, _ = done.out.splitlines()
    assert "steps to 0.01" in head
    assert (first.split()[0], second.split()[0]) == ("ssp", "hierarchical")
    folder = tmp_path / "runs" / "job-compare"
    found = {path.name for path in folder.iterdir()}
    pictures = {"compare.json", "compare.csv", "compare.png"}
    assert found == {*pictures, "ssp-max_staleness=1", "hierarchical-sync_every=2"}
