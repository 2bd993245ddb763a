"""The samples that `goodput.py` counts as useful, the ranks that it kills, and the errors that it finds."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import programs
from goodput import random_judge, simulated
from goodput.contestants import GROUPS, SYNC
from goodput.killer import KINDS, Killer, failures
from goodput.random_runs import played, write_store
from goodput.settings import Hazard, Setting
from goodput.useful import of_groups, of_one_job, of_replicas, standing


def commit(t: int, counted: list[int], **more: Any) -> dict[str, Any]:
    return {"event": "commit", "t": t, "counted": counted, **more}


def test_useful_are_the_samples_of_groups_that_counted():
    """Three groups make 4 steps. After one died, two make 4. The end of an epoch adds none. All make 2."""
    events = [
        commit(4, [0, 1, 2]),
        {"event": "lost"},
        commit(8, [0, 2]),
        commit(8, [0, 2]),
        commit(10, [0, 1, 2]),
    ]
    assert of_groups(events, batch=8) == 8 * (4 * 3 + 4 * 2 + 0 + 2 * 3)


def test_rounds_after_the_checkpoint_from_which_all_began_again_do_not_count():
    events = [commit(4, [0, 1]), commit(8, [0, 1]), commit(12, [0, 1]), commit(8, [1]), commit(12, [1])]
    assert [(event["t"], event["counted"], steps) for event, steps in standing(events)] == [
        (4, [0, 1], 4), (8, [0, 1], 4), (8, [1], 0), (12, [1], 4)
    ]  # fmt: skip
    assert of_groups(events, batch=1) == 4 * 2 + 4 * 2 + 4


def test_of_one_job_what_came_after_the_checkpoint_is_lost_with_its_life():
    first = [("begins", 0), ("made", 5), ("saved", 5), ("made", 9)]
    second = [("begins", 5), ("made", 7)]
    assert of_one_job([first], at_work=True, batch=10) == 90
    assert of_one_job([first], at_work=False, batch=10) == 50
    assert of_one_job([first, second], at_work=True, batch=10) == 70
    assert of_one_job([first, []], at_work=True, batch=10) == 50


def test_replicas_that_were_given_a_state_or_did_not_commit_count_nothing():
    assert of_replicas([(0, 1), (1, 2), (2, 2), (0, 3), (3, 4)], batch=8, every=5) == 8 * 5 * 3


def test_failures_are_of_ranks_groups_and_nodes_as_often_as_asked():
    setting = Setting(P=4, K=2, per_node=4)
    plan = failures(setting, mtbf=2.0, seconds=4000.0, seed=3)
    assert plan == failures(setting, mtbf=2.0, seconds=4000.0, seed=3)
    assert len(plan) == pytest.approx(2000, rel=0.1)
    assert {failure.kind: len(failure.ranks) for failure in plan} == {"rank": 1, "group": 2, "node": 4}
    assert all(times == pytest.approx(667, rel=0.15) for times in Counter(f.kind for f in plan).values())
    assert {failure.ranks for failure in plan if failure.kind == "node"} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    hazard = Hazard(setting, 2.0)
    assert setting.nodes / hazard.of_a_node + setting.ranks / hazard.of_a_rank == pytest.approx(1 / 2.0)
    assert len(KINDS) == 3


def test_the_killer_kills_who_is_there():
    waits = [sys.executable, "-I", "-S", "-c", "input()"]
    with (
        programs.start(waits, stdin=programs.PIPE) as first,
        programs.start(waits, stdin=programs.PIPE) as second,
    ):
        plan = failures(Setting(P=2, per_node=1), mtbf=1e-4, seconds=1.0, seed=1)
        killer = Killer([f for f in plan if f.ranks == (1,)][:1], lambda: {0: first.pid, 1: second.pid})
        while not killer.happened:
            killer.look()
        assert second.wait(60) == -9
        assert first.poll() is None
        first.communicate("\n")


def test_one_job_suffers_where_groups_do_not():
    curve = simulated._both(100, 100 * 420.0, 420.0)  # pyright: ignore[reportPrivateUsage]
    assert curve[SYNC] < 0.4
    assert curve[GROUPS] > 0.85


@pytest.mark.slow
def test_a_random_run_is_right():
    """The run has its own process, because forks of a process may fail if it has computed with torch."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        row = alone.submit(played, 1, 1, print).result()
    assert row["wrong"] == []
    assert row["rounds"]
    assert 0 < row["samples"] <= row["by_formula"]


RATE = 0.5


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Return the folder of a correct run of two groups: one round of two steps, each of two samples."""
    store = write_store(tmp_path / "small.h5")
    (tmp_path / "run").mkdir()
    import h5py

    with h5py.File(store) as file:
        x, y = (torch.from_numpy(np.asarray(file[f"train/{name}"])) for name in "xy")
    start = np.zeros(18, np.float32)
    rows = {0: [[0, 1], [2, 3]], 1: [[4, 5], [6, 7]]}
    ends = {
        replica_group: random_judge.sgd(start, steps, x, y, RATE) for replica_group, steps in rows.items()
    }
    mean = (ends[0] + ends[1]) / 2
    for replica_group, steps in rows.items():
        at = 0.0
        with (
            (tmp_path / f"frames-{replica_group}-1-0").open("wb") as frames,
            (tmp_path / f"steps-{replica_group}-1-0").open("wb") as told,
        ):
            for t, brought, rounds, took, seen in [
                (0, start, 1, start, []),
                (2, ends[replica_group], 2, mean, steps),
            ]:
                at += 1.0
                pickle.dump((t, seen), told)
                pickle.dump((replica_group, 0, (), at, brought), frames)
                pickle.dump((replica_group, rounds, (0, 1), at, took), frames)
    events = [
        commit(0, [0, 1], rounds=1, members=[0, 1], epoch=0, fraction=0.0),
        commit(2, [0, 1], rounds=2, members=[0, 1], epoch=1, fraction=0.0),
        {"event": "finished"},
    ]
    lines = [json.dumps({"unix": 5.0 + i, "at": float(i), **event}) for i, event in enumerate(events)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    torch.save({"inner.weight": torch.from_numpy(mean).view(3, 6)}, tmp_path / "run" / "model.pt")
    return tmp_path


def wrong(left: Path, codes: dict[int, list[int]] | None = None, late: set[int] | None = None) -> list[str]:
    store, ended = left / "small.h5", codes or {0: [0], 1: [0]}
    return random_judge.judge(left, store, 2, RATE, ended, late or set(), in_time=True)["wrong"]


def replaced(path: Path, change: Any) -> None:
    entries = list(random_judge.read(path))
    path.write_bytes(b"".join(pickle.dumps(change(place, entry)) for place, entry in enumerate(entries)))


def test_a_run_that_is_right_is_found_right(left: Path):
    assert wrong(left) == []


def test_a_sample_that_counts_twice_is_found(left: Path):
    replaced(left / "steps-1-1-0", lambda place, told: (2, [[0, 5], [6, 7]]) if place else told)
    found = wrong(left)
    assert "epoch 0: samples [0] counted twice" in found
    assert "life 1-1: what it brought after step 2 is not what it learned" in found


def test_a_mean_that_is_none_is_found(left: Path):
    replaced(left / "frames-0-1-0", lambda place, frame: (*frame[:4], frame[4] + 1) if place == 3 else frame)
    assert "round 2: not the same bits" in wrong(left)


def test_an_exit_code_and_a_model_are_found(left: Path):
    (left / "log-1-1").write_text("Traceback")
    torch.save({"inner.weight": torch.full((3, 6), torch.nan)}, left / "run" / "model.pt")
    assert wrong(left, {0: [0], 1: [1, 0]}) == [
        "life 1 of group 1 ended with 1: Traceback",
        "the model is not finite",
    ]
    (left / "log-1-1").write_text(f"... {random_judge.GONE_BACK} to step 4 from 8")
    os.remove(left / "run" / "model.pt")
    assert wrong(left, {0: [-9, 0], 1: [1, 0]}) == ["no model was saved"]


def test_only_who_was_late_for_the_end_may_stay_killed(left: Path):
    killed = {0: [0], 1: [-9, -9]}
    assert wrong(left, killed, late={1}) == []
    assert wrong(left, killed, late={0}) == ["life 2 of group 1 ended with -9: "]
