"""Loggers get the records of metrics.jsonl under one run id; their failures affect nothing else."""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsgd.config.schema import Config, load
from hpcsgd.errors import UserError
from hpcsgd.report.loggers import LOGGERS, make_logger_of, processes, require_loggers
from hpcsgd.report.loggers.base import LoggerRun, scalars
from hpcsgd.report.loggers.mlflow import mlflow
from hpcsgd.report.loggers.processes import LoggerProcesses, logger_run
from hpcsgd.report.metrics import Metrics, Record, read
from train.launches import JOB

USER = '''
import json, os, sys, threading, time

class MyLogger:
    """Writes down what it is told."""

    def __init__(self, run, file="told"):
        self.run, self.file = run, open(f"{run.folder}/{file}", "a")
        self.say({"began": run.id, "name": run.name, "group": run.group, "resumed": run.resumed_step,
                  "lr": run.config["optimizer"]["lr"]})

    def say(self, what):
        print(json.dumps(what), file=self.file, flush=True)

    def write(self, records):
        for record in records:
            self.say(record)

    def close(self, failed):
        self.say({"failed": failed})

class Stubborn(MyLogger):
    """Does not come to its end: neither in `close`, nor when its process ends."""

    def close(self, failed):
        threading.Thread(target=time.sleep, args=(1000,)).start()

class Refuses:
    def __init__(self, run):
        raise OSError("no route to the server")

class Tires(MyLogger):
    def write(self, records):
        raise ValueError("records are too heavy")

class Leaves(MyLogger):
    def write(self, records):
        sys.exit(3)

class Crashes(MyLogger):
    def write(self, records):
        os.abort()

class Sleeps(MyLogger):
    def __init__(self, run):
        time.sleep(1000)
'''
WORKING = "user:MyLogger"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user", raising=False)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "runs" / "job").mkdir(parents=True)
    return tmp_path


def config() -> Config:
    return load(Path("job.toml"))


def tell(
    metrics: Callable[..., None] | None, said: Sequence[Any], steps: range, *, resumed: int = 0, of: str = ""
) -> Path:
    """Record metrics of these steps with a run's loggers, and return the run folder."""
    run = Path("runs/job", of)
    run.mkdir(parents=True, exist_ok=True)
    with (
        LoggerProcesses(said, logger_run(run, config(), resumed)) as loggers,
        Metrics(run / "metrics.jsonl", resumed_step=resumed, also=loggers.put) as written,
    ):
        for t in steps:
            written.sync(step=t, distance=t / 4)
            written.method(t, {"delta": 0.5})
            if metrics is not None:
                metrics(t)
    return run


def told(run: Path, file: str = "told") -> list[Record]:
    return [json.loads(line) for line in (run / "loggers" / file).read_text().splitlines()]


def test_a_users_own_is_given_what_is_written_under_one_id(folder: Path) -> None:
    first = told(tell(None, [WORKING], range(1, 4)))
    assert first[1:-1] == read(Path("runs/job/metrics.jsonl"))
    ours = {"name": "job", "group": None, "lr": 0.1}
    assert first[0] == {"began": first[0]["began"], "resumed": 0, **ours}
    assert first[-1] == {"failed": False}
    again = told(tell(None, [WORKING], range(3, 6), resumed=2))[len(first) :]
    assert again[0] == {"began": first[0]["began"], "resumed": 2, **ours}
    assert again[1:-1] == read(Path("runs/job/metrics.jsonl"))[4:]


def test_each_group_has_an_id_of_its_own_and_all_a_name(folder: Path) -> None:
    began = [told(tell(None, [WORKING], range(1), of=f"replica_groups/{n}"))[0] for n in range(2)]
    assert [(b["name"], b["group"]) for b in began] == [
        ("job/replica_groups/0", "job"),
        ("job/replica_groups/1", "job"),
    ]
    assert began[0]["began"] != began[1]["began"]


def test_arguments_and_two_of_one_kind(folder: Path) -> None:
    run = tell(None, [{"name": WORKING, "file": "a"}, {"name": WORKING, "file": "b"}], range(1, 3))
    assert told(run, "a") == told(run, "b")
    assert {path.name for path in (run / "loggers").glob("*.log")} == {"MyLogger.log", "MyLogger-2.log"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logger", "fault"),
    [
        ("Refuses", "OSError: no route to the server"),
        ("Tires", "ValueError: records are too heavy"),
        ("Leaves", "no output"),
        ("Crashes", ""),
    ],
)
def test_one_that_fails_is_reported_once_and_others_go_on(
    folder: Path, caplog: pytest.LogCaptureFixture, logger: str, fault: str
) -> None:
    log = Path("runs/job/loggers", f"{logger}.log")

    def until_it_is_gone(t: int) -> None:
        time.sleep(0.02 if log.exists() else 0.2)

    with caplog.at_level(logging.WARNING):
        own = {"name": WORKING, "file": "own"}
        run = tell(until_it_is_gone, [f"user:{logger}", own], range(1, 30))
    assert told(run, "own")[1:-1] == read(run / "metrics.jsonl")
    (message,) = caplog.messages
    assert message.startswith(f"logger {logger}: ended, and gets no more of this run: {fault}")


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["Stubborn", "Sleeps"])
def test_one_that_does_not_end_is_ended(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, logger: str
) -> None:
    monkeypatch.setattr(LoggerProcesses.close, "__defaults__", (3.0,))
    began = time.monotonic()
    run = tell(None, [f"user:{logger}", {"name": WORKING, "file": "own"}], range(1, 3))
    assert time.monotonic() - began < 30
    assert told(run, "own")[-1] == {"failed": False}
    assert caplog.messages == [f"logger {logger}: did not end in time; metrics.jsonl has all records"]


def test_one_that_is_slow_delays_nobody_and_what_it_missed_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logger's pipe is full after 64 kB; then records wait, and after `WAITING` of them are dropped."""
    monkeypatch.setattr(processes, "WAITING", 10)
    monkeypatch.setattr(LoggerProcesses.close, "__defaults__", (0.5,))
    longest = 0.0
    with LoggerProcesses(["user:Sleeps"], logger_run(Path("runs/job"), config(), 0)) as loggers:
        for _ in range(300):
            began = time.perf_counter()
            loggers.put(b"x" * 1000 + b"\n")
            longest = max(longest, time.perf_counter() - began)
            time.sleep(1e-4)
    assert longest < 0.5
    (late, slow) = caplog.messages
    assert "did not end in time" in late
    count = int(slow.removeprefix("logger Sleeps: was too slow: ").split()[0])
    assert 100 < count < 300


def test_a_run_that_dies_says_so(folder: Path) -> None:
    def dies(t: int) -> None:
        deadline = time.monotonic() + 60
        while not Path("runs/job/loggers/told").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        tell(dies, [WORKING], range(1, 3))
    assert told(Path("runs/job"))[-1] == {"failed": True}


def test_a_process_that_has_been_forked_keeps_no_logger_waiting(folder: Path) -> None:
    """Forked processes, such as loader processes, hold the pipe open as well."""
    with LoggerProcesses([WORKING], logger_run(Path("runs/job"), config(), 0)) as loggers:
        deadline = time.monotonic() + 60
        while not Path("runs/job/loggers/told").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        copies = [os.dup(file) for file in _pipes()]
        began = time.monotonic()
        loggers.close()
        assert time.monotonic() - began < processes.CLOSING / 2
    for copy in copies:
        os.close(copy)
    assert told(Path("runs/job"))[-1] == {"failed": False}


def _pipes() -> list[int]:
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    return [file for file in files if _is_pipe(file)]


def _is_pipe(file: int) -> bool:
    with suppress(OSError):
        return stat.S_ISFIFO(os.fstat(file).st_mode)
    return False


def test_numbers_have_places() -> None:
    record = {"kind": "step", "step": 3, "loss": 2, "phase_bytes": {"model_average": 8}, "name": "x"}
    assert dict(scalars(record)) == {"step/loss": 2.0, "step/phase_bytes/model_average": 8.0}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "tensorbord",
            r"\[run\] loggers: no 'tensorbord'; did you mean 'tensorboard'\? Allowed: mlflow, ",
        ),
        (
            {"name": "wandb", "projekt": "x"},
            r"\[run\] loggers: wandb has no argument 'projekt'; did you mean 'project'\?",
        ),
        ({"name": "mlflow", "experiment": 3}, r"\[run\] loggers: mlflow: experiment = 3: expected str"),
        ({"project": "x"}, r"\[run\] loggers = .*: expected a name, or a table with it"),
        ("user:Logger", r"no 'Logger' in user; did you mean 'MyLogger'\?"),
    ],
)
def test_what_could_not_begin_is_reported_before(folder: Path, said: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        require_loggers([said])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_reported_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / name).mkdir()  # like the folder that W&B creates, which is not a library
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    message = rf'^\[run\] loggers {name}: needs the library `{name}`: pip install "hpcsgd\[{name}\]"$'
    with pytest.raises(UserError, match=message):
        make_logger_of(name)


def drawn_by_tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that tensorboard reads from its own files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = accumulator.EventAccumulator(str(run / "loggers" / "tensorboard"))
    seen.Reload()
    return {tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_draws_one_run(folder: Path) -> None:
    """Steps that are repeated after a restart replace the earlier ones."""
    tell(None, ["tensorboard"], range(1, 5))
    run = tell(None, ["tensorboard"], range(3, 7), resumed=2)
    distances = [(t, t / 4) for t in range(1, 7)]
    assert drawn_by_tensorboard(run)["sync/distance"] == distances
    assert drawn_by_tensorboard(run)["method/delta"] == [(t, 0.5) for t, _ in distances]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_draws_what_a_run_has_written_so_far(folder: Path) -> None:
    run = Path("runs/job")
    logger = make_logger_of("tensorboard")(logger_run(run, config(), 0))
    for t in range(1, 11):  # the library itself writes the first ones at once, and later ones after minutes
        logger.write([{"kind": "sync", "step": t, "distance": t / 4}])
        assert drawn_by_tensorboard(run) == {"sync/distance": [(i, i / 4) for i in range(1, t + 1)]}
    logger.close(failed=False)


@pytest.mark.long
def test_wandb_offline_keeps_one_id(folder: Path) -> None:
    pytest.importorskip("wandb")
    said = [{"name": "wandb", "mode": "offline", "project": "p"}]
    tell(None, said, range(1, 3))
    run = tell(None, said, range(3, 5), resumed=2)
    own = (run / "loggers" / "id").read_text().strip()
    files = sorted((run / "loggers" / "wandb").glob(f"offline-run-*-{own}/run-{own}.wandb"))
    assert len(files) == 2
    assert [_logged_by_wandb(file) for file in files] == [[(1, 0.25), (2, 0.5)], [(3, 0.75), (4, 1.0)]]


def _logged_by_wandb(file: Path) -> list[tuple[int, float]]:
    """Return the steps and distances of synchronizations in a file of W&B."""
    kinds = import_module("wandb.proto.wandb_internal_pb2")
    found = []
    for data in _blocks(file.read_bytes()):
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in kinds.Record.FromString(data).history.item
        }
        if "sync/distance" in items:
            found.append((items["at_step"], items["sync/distance"]))
    return found


def _blocks(data: bytes, header: int = 7, size: int = 1 << 15) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, joined from their parts."""
    at, record = header, b""
    while at + header <= len(data):
        length, part = struct.unpack_from("<HB", data, at + 4)
        if part == 0 or size - at % size < header:
            at += size - at % size
            continue
        record += data[at + header : at + header + length]
        at += header + length
        if part in (1, 4):
            yield record
            record = b""


class LimitedServer:
    """A stand-in for the client of MLflow, whose server refuses messages above its limits."""

    def __init__(self) -> None:
        self.params: dict[str, str] = {}
        self.metrics: list[tuple[str, float, int]] = []

    def __getattr__(self, call: str) -> Callable[..., Any]:
        assert call in {"get_experiment_by_name", "create_experiment", "search_runs", "create_run"}
        run = SimpleNamespace(info=SimpleNamespace(run_id="1"))
        return lambda *_, **__: {"search_runs": [], "create_run": run}.get(call)

    def log_batch(self, _: str, *, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100
        assert all(len(text) <= 500 for _, text in params)
        self.params.update(params)
        self.metrics += [(key, value, step) for key, value, _, step in metrics]


def test_mlflow_gets_everything_in_messages_within_its_limits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LimitedServer()
    as_given = SimpleNamespace(Metric=lambda *given: given, Param=lambda *given: given)
    library = SimpleNamespace(entities=as_given, MlflowClient=lambda tracking_uri: server)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    config = {"model": {f"argument_{i}": i for i in range(201)}, "long": "x" * 501}
    logger = mlflow(LoggerRun("id", "job", None, str(folder), 0, config))
    steps = range(1, 2003)
    logger.write([{"kind": "sync", "step": t, "distance": t / 4} for t in steps])
    assert server.metrics == [("sync/distance", t / 4, t) for t in steps]
    assert server.params == {f"model.argument_{i}": str(i) for i in range(201)} | {"long": "x" * 500}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    place = str(folder / "kept")
    said = [{"name": "mlflow", "uri": place}]
    tell(None, said, range(1, 3))
    run = tell(None, said, range(3, 5), resumed=2)
    client = library.MlflowClient(tracking_uri=place)
    (found,) = client.search_runs([client.get_experiment_by_name("hpcsgd").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "job")
    assert found.data.tags["hpcsgd.run"] == (run / "loggers" / "id").read_text().strip()
    assert (found.data.params["optimizer.lr"], found.data.params["method.name"]) == ("0.1", "hierarchical")
    history = client.get_metric_history(found.info.run_id, "sync/distance")
    assert [(m.step, m.value) for m in history] == [(t, t / 4) for t in range(1, 5)]
