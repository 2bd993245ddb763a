from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from files.test_lock import another_process_in
from hpcsgd.checkpoint import Checkpoints, Saved, folder, manifest, tree
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.replica_groups import Absent
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError
from hpcsgd.files import hdf5, lock

FILES = ["rank-00000.h5", "rank-00001.h5", "rank-00002.h5", "rank-00003.h5", "manifest.json"]


def state(step: int, rank: int) -> tree.Tree:
    return {"x": torch.full((50,), step + rank / 10), "step": step}


def write(world: Communicator, path: Path, *steps: int) -> None:
    topology = form(world, groups=1 if world.size < 4 else 2)
    for step in steps:
        Checkpoints(path, topology).write(step, state(step, topology.rank))


def newest(world: Communicator, path: Path) -> Saved | None:
    return Checkpoints(path, form(world)).newest()


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 10 and 20, each of 2 × 2 ranks."""
    threads.run(4, write, tmp_path, 10, 20)
    return tmp_path


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_every_rank_finds_what_it_saved(run, tmp_path: Path, n: int) -> None:
    def there_and_back(world: Communicator) -> bool:
        write(world, tmp_path / "not" / "there yet", 7)
        saved = newest(world, tmp_path / "not" / "there yet")
        assert saved is not None
        assert (saved.step, saved.P * saved.K) == (7, world.size)
        g, j = divmod(world.rank, saved.K)
        with h5py.File(saved.rank_file(g, j)) as file:
            return torch.equal(tree.read(file)["x"], state(7, world.rank)["x"])

    assert run(n, there_and_back) == [True] * n


@pytest.mark.ranks(2)
def test_without_any_there_is_none(run, tmp_path: Path) -> None:
    assert run(2, newest, tmp_path / "nowhere") == [None, None]


@pytest.mark.ranks(2)
def test_the_two_newest_are_kept(run, tmp_path: Path) -> None:
    def steps(world: Communicator) -> list[list[str]]:
        seen = []
        for step in (90, 100, 99_999_999, 100_000_000, 2_000_000_000):
            write(world, tmp_path, step)
            world.barrier()
            seen.append(names(tmp_path))
            world.barrier()
        return seen

    assert run(2, steps)[0] == [
        ["step-00000090"],
        ["step-00000090", "step-00000100"],
        ["step-00000100", "step-99999999"],
        ["step-100000000", "step-99999999"],
        ["step-100000000", "step-2000000000"],
    ]
    found = run(2, newest, tmp_path)[0]
    assert found.step == 2_000_000_000


def test_what_the_user_keeps_beside_stays(tmp_path: Path) -> None:
    for name in ("step-00000005.bak", "step-best", "notes"):
        (tmp_path / name).mkdir()
    threads.run(1, write, tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["notes", "step-00000002", "step-00000003", "step-00000005.bak", "step-best"]
    assert threads.run(1, newest, tmp_path)[0] == Saved(tmp_path / "step-00000003", 3, 1, 1)


class DiskFull(OSError):
    def __init__(self) -> None:
        super().__init__(28, "No space left on device")


def failing_on(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, when: Callable[..., bool]) -> None:
    real = getattr(target, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            raise DiskFull
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, fails)


def is_of_rank(rank: int) -> Callable[..., bool]:
    return lambda path, *_: Path(path).name.endswith(f"rank-{rank:05d}.h5")


@pytest.fixture(params=["rank 3's file", "hashing", "manifest", "renaming", "making the folder"])
def broken_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A disk that becomes full during one step of writing a checkpoint."""
    match request.param:
        case "rank 3's file":
            failing_on(monkeypatch, folder, "new_file", is_of_rank(3))
        case "hashing":
            failing_on(monkeypatch, folder, "fingerprint", is_of_rank(0))
        case "manifest":
            failing_on(monkeypatch, Path, "write_text", lambda *_: True)
        case "renaming":
            failing_on(monkeypatch, os, "replace", lambda source, _: ".writing" in str(source))
        case _:
            failing_on(monkeypatch, Path, "mkdir", lambda *_: True)
    yield request.param
    monkeypatch.undo()


def error_of_every_rank(world: Communicator, function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(JobError) as caught:
        function(world, *args)
    return str(caught.value)


def test_a_full_disk_leaves_what_was_there(two: Path, broken_disk: str) -> None:
    before = content(two)
    messages = threads.run(4, error_of_every_rank, write, two, 30)
    assert len(set(messages)) == 1
    assert "checkpoint not written: No space left on device" in messages[0]
    assert content(two) == before
    assert names(two) == ["step-00000010", "step-00000020"]


def test_a_rank_alone_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_on(monkeypatch, folder, "fingerprint", is_of_rank(0))
    threads.run(1, error_of_every_rank, write, tmp_path, 30)
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_while_hdf5_writes(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(disk: hdf5.Disk, _: memoryview) -> None:
        disk._failure = DiskFull()

    before = content(two)
    monkeypatch.setattr(hdf5.Disk, "write", full)
    messages = threads.run(4, error_of_every_rank, write, two, 30)
    assert "No space left on device" in messages[0]
    assert (content(two), names(two)) == (before, ["step-00000010", "step-00000020"])


@pytest.mark.ranks(2)
def test_an_exception_while_writing_leaves_what_was_there(run, tmp_path: Path) -> None:
    def interrupted(world: Communicator) -> str:
        write(world, tmp_path, 10)
        world.barrier()
        before = content(tmp_path)
        world.barrier()
        topology = form(world)
        unwritable = {"x": range(3)} if world.rank == 1 else {"x": 1}
        message = error_of_every_rank(world, lambda _: Checkpoints(tmp_path, topology).write(20, unwritable))
        world.barrier()
        assert content(tmp_path) == before
        return message

    messages = run(2, interrupted)
    assert messages == ["rank 1 of 2, writing a checkpoint: x: a range cannot be saved in a checkpoint"] * 2
    assert names(tmp_path) == ["step-00000010"]


@pytest.mark.ranks(2)
def test_what_a_killed_run_left_is_swept_away(run, tmp_path: Path) -> None:
    def after_a_kill(world: Communicator) -> None:
        if world.rank == 0:
            (tmp_path / ".writing-step-00000010").mkdir()
            (tmp_path / ".writing-step-00000010" / "rank-00000.h5").write_text("half")
            (tmp_path / ".writing-step-00000030").mkdir()
        world.barrier()
        assert newest(world, tmp_path) is None
        write(world, tmp_path, 30)

    run(2, after_a_kill)
    assert names(tmp_path) == ["step-00000030"]
    assert threads.run(1, newest, tmp_path)[0] == Saved(tmp_path / "step-00000030", 30, 1, 2)


def of_replica_group(world: Communicator, path: Path, index: int) -> Checkpoints:
    return Checkpoints(path, replace(form(world), replica_groups=Absent(index, 20)))


@pytest.mark.parametrize("step", [12, 24])
def test_another_replica_group_may_write_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A later step, or the same one. Neither removes what the other writes or has written."""

    def body(world: Communicator) -> None:
        slow, fast = of_replica_group(world, tmp_path, 1), of_replica_group(world, tmp_path, 11)
        of_replica_group(world, tmp_path, 0).write(6, state(6, 0))
        write_tree = tree.write

        def write_late(file: h5py.File, root: tree.Tree) -> None:
            monkeypatch.setattr(tree, "write", write_tree)
            fast.write(step, state(step, 1))
            write_tree(file, root)

        monkeypatch.setattr(tree, "write", write_late)
        slow.write(12, state(12, 0))
        found = fast.newest()
        assert found is not None
        assert found.step == step
        assert slow.whole(slow.of_step(12))

    threads.run(1, body)
    assert names(tmp_path) == [f"step-{n:08}" for n in ((12, 24) if step == 24 else (6, 12))]


def test_a_replica_group_removes_what_itself_has_left(tmp_path: Path) -> None:
    left = [f".writing-step-00000010{end}" for end in (".of-1", ".of-11", ".of-1.old")]
    for name in left:
        (tmp_path / name).mkdir()
    threads.run(1, lambda world: of_replica_group(world, tmp_path, 1).write(12, state(12, 0)))
    assert names(tmp_path) == [".writing-step-00000010.of-11", "step-00000012"]


class Killed(BaseException):
    """Ends a rank as SIGKILL would: nobody catches it and removes what is unfinished."""


@pytest.fixture(params=[None, 1], ids=["a job", "a replica group"])
def checkpoints_of(request: pytest.FixtureRequest) -> Callable[[Communicator, Path], Checkpoints]:
    """Return the checkpoints of a job, or of a group of an elastic run."""

    def of(world: Communicator, path: Path) -> Checkpoints:
        index = request.param
        return Checkpoints(path, form(world)) if index is None else of_replica_group(world, path, index)

    return of


def write_a_step_again(checkpoints: Checkpoints, what: type[BaseException]) -> None:
    """Write a checkpoint of step 20, and raise `what` in place of renaming the second one of this step."""
    checkpoints.write(20, {"x": 1})
    with pytest.MonkeyPatch.context() as patch:
        real = os.replace

        def replace(source: Path, target: Path) -> None:
            if Path(target).name == "step-00000020" and not str(source).endswith(".old"):
                raise what
            real(source, target)

        patch.setattr(os, "replace", replace)
        with pytest.raises(Killed if what is Killed else JobError):
            checkpoints.write(20, {"x": 2})


def value(saved: Saved | None) -> int:
    assert saved is not None
    with h5py.File(saved.rank_file(0, 0)) as file:
        return tree.read(file)["x"]


@pytest.mark.parametrize("how", ["put_back", "recover", "write"])
def test_a_kill_between_two_renames_keeps_the_checkpoint_of_this_step(
    tmp_path: Path, checkpoints_of: Callable[[Communicator, Path], Checkpoints], how: str
) -> None:
    def body(world: Communicator) -> None:
        checkpoints = checkpoints_of(world, tmp_path)
        write_a_step_again(checkpoints, Killed)
        assert "step-00000020" not in names(tmp_path)
        checkpoints.write(30, {"x": 3}) if how == "write" else getattr(checkpoints, how)()
        assert value(checkpoints.of_step(20)) == 1
        checkpoints.write(20, {"x": 4})
        assert value(checkpoints.of_step(20)) == 4

    threads.run(1, body)
    assert not [name for name in names(tmp_path) if name.startswith(".writing")]


def test_a_failure_of_the_second_rename_keeps_the_checkpoint_of_this_step(
    tmp_path: Path, checkpoints_of: Callable[[Communicator, Path], Checkpoints]
) -> None:
    def body(world: Communicator) -> int:
        checkpoints = checkpoints_of(world, tmp_path)
        write_a_step_again(checkpoints, DiskFull)
        return value(checkpoints.newest())

    assert threads.run(1, body) == [1]
    assert names(tmp_path) == ["step-00000020"]


def test_what_another_process_or_group_replaces_now_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.0)

    def body(world: Communicator) -> None:
        other, mine = of_replica_group(world, tmp_path, 11), of_replica_group(world, tmp_path, 1)
        write_a_step_again(other, Killed)
        mine.put_back()
        mine.write(30, {"x": 3})
        assert ".writing-step-00000020.of-11.old" in names(tmp_path)
        with another_process_in(tmp_path), pytest.raises(JobError, match="in use by process"):
            mine.recover()
        assert mine.newest() == Saved(tmp_path / "step-00000030", 30, 1, 1)

    threads.run(1, body)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {"truncated by one byte": truncate, "flipped byte": flip_a_byte, "missing": Path.unlink}
SAYS = {
    "truncated by one byte": "bytes instead of",
    "flipped byte": "does not match its",
    "missing": "missing",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("n", [1, 3])
def test_damage_falls_back_to_the_one_before(two: Path, n: int, file: str, damage: str, warnings) -> None:
    DAMAGES[damage](two / "step-00000020" / file)
    assert threads.run(n, newest, two) == [Saved(two / "step-00000010", 10, 2, 2)] * n
    (warning,) = warnings()  # only rank 0 warns
    assert "checkpoint step-00000020 is damaged" in warning
    assert "falling back to the one before" in warning
    if (file, damage) != ("manifest.json", "flipped byte"):  # it may be in any file's checksum
        assert file in warning
    if file != "manifest.json":
        assert SAYS[damage] in warning


def test_damage_of_the_older_one_does_not_matter(two: Path, warnings) -> None:
    truncate(two / "step-00000010" / FILES[0])
    assert threads.run(2, newest, two) == [Saved(two / "step-00000020", 20, 2, 2)] * 2
    assert warnings() == []


def test_all_damaged_is_an_error_on_every_rank(two: Path) -> None:
    truncate(two / "step-00000010" / FILES[0])
    flip_a_byte(two / "step-00000020" / FILES[3])
    messages = threads.run(2, error_of_every_rank, newest, two)
    assert messages == [f"{two}: all checkpoints are damaged: step-00000020, step-00000010"] * 2


def failing_once(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, code: int, when: Callable[..., bool]
) -> None:
    real, failed = getattr(target, name), threading.Event()

    def fails(*args: Any) -> Any:
        if when(*args) and not failed.is_set():
            failed.set()
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(target, name, fails)


UNREADABLE: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "step-00000020/rank-00003.h5": (manifest, "fingerprint", is_of_rank(3)),
    "step-00000020/manifest.json": (Path, "read_bytes", lambda path: path.name == "manifest.json"),
    "step-00000020": (os, "listdir", lambda path: Path(path).name == "step-00000020"),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_once_is_an_error_on_every_rank_and_no_damage(
    two: Path, monkeypatch: pytest.MonkeyPatch, what: str, warnings
) -> None:
    """Otherwise the checkpoint before would be loaded, and the next one to be saved would remove this one."""
    target, name, when = UNREADABLE[what]
    failing_once(monkeypatch, target, name, errno.EIO, when)
    messages = threads.run(4, error_of_every_rank, newest, two)
    assert len(set(messages)) == 1
    assert messages[0].endswith(f"{two / what}: cannot be read: {os.strerror(errno.EIO)}")
    assert threads.run(4, newest, two) == [Saved(two / "step-00000020", 20, 2, 2)] * 4
    assert warnings() == []


def test_a_file_that_another_replica_group_removes_while_it_is_read_is_missing(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(path: Path) -> bool:
        newest_of_rank_3 = path == two / "step-00000020" / FILES[3]
        if newest_of_rank_3:
            path.unlink()
        return newest_of_rank_3

    failing_once(monkeypatch, manifest, "fingerprint", errno.ESTALE, remove)
    assert threads.run(2, newest, two) == [Saved(two / "step-00000010", 10, 2, 2)] * 2


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another version": lambda m: m | {"format": 1},
    "another step": lambda m: m | {"step": 30},
    "another shape": lambda m: m | {"P": 3},
    "a list": lambda m: [m],
    "a file too few": lambda m: m | {"files": m["files"][1:]},
    "no files": lambda m: {key: value for key, value in m.items() if key != "files"},
    "files of nothing": lambda m: m | {"files": [None] * 4},
}


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_wrong_manifest_is_damage(two: Path, change: str) -> None:
    path = two / "step-00000020" / "manifest.json"
    path.write_text(json.dumps(MANIFESTS[change](json.loads(path.read_text()))))
    assert threads.run(2, newest, two) == [Saved(two / "step-00000010", 10, 2, 2)] * 2


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_of_the_manifest_is_noticed_or_harmless(two: Path, data: st.DataObject) -> None:
    path = two / "step-00000020" / "manifest.json"
    good = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    try:
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :])
        (found,) = threads.run(1, newest, two)
    finally:
        path.write_bytes(good)
    assert found in (Saved(two / "step-00000020", 20, 2, 2), Saved(two / "step-00000010", 10, 2, 2))


def test_going_on_after_a_fallback_rewrites_the_damaged_step(two: Path, warnings) -> None:
    truncate(two / "step-00000020" / FILES[2])
    threads.run(4, write, two, 20)
    assert names(two) == ["step-00000010", "step-00000020"]
    assert threads.run(2, newest, two) == [Saved(two / "step-00000020", 20, 2, 2)] * 2
    assert warnings() == []


def test_going_on_after_a_fallback_drops_damaged_later_steps(two: Path, warnings) -> None:
    """Otherwise it would take the place of a valid checkpoint, and every start would warn of it."""
    truncate(two / "step-00000020" / FILES[2])
    threads.run(4, write, two, 15)
    assert names(two) == ["step-00000010", "step-00000015"]
    assert threads.run(2, newest, two) == [Saved(two / "step-00000015", 15, 2, 2)] * 2
    assert warnings() == []


@pytest.mark.ranks(2)
def test_the_same_step_again_replaces_it(run, tmp_path: Path) -> None:
    def twice(world: Communicator) -> int:
        topology = form(world)
        for value in (1, 2):
            Checkpoints(tmp_path, topology).write(5, {"value": value})
        saved = Checkpoints(tmp_path, topology).newest()
        assert saved is not None
        with h5py.File(saved.rank_file(0, world.rank)) as file:
            return tree.read(file)["value"]

    assert run(2, twice) == [2, 2]
    assert names(tmp_path) == ["step-00000005"]


def test_a_checkpoint_may_be_copied_elsewhere(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two / "step-00000020", tmp_path / "elsewhere" / "step-00000020")
    found = threads.run(1, newest, tmp_path / "elsewhere")[0]
    assert found == Saved(tmp_path / "elsewhere" / "step-00000020", 20, 2, 2)
