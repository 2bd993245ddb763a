"""Judge whether a run of groups was right, from their frames and the coordinator's event log."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcsgd.elastic import event_log


@dataclass
class Outcome:
    """The errors of a run, if any, and the seconds without progress after each fault."""

    wrong: list[str] = field(default_factory=list)
    standstill: list[tuple[str, float]] = field(default_factory=list)
    rounds: int = 0


class Frames:
    """A file with a rank's parameters before (rounds 0) and after each synchronization.

    Each frame is written without buffering, so that it survives a kill.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, replica_group: int, rounds: int, counted: tuple[int, ...], w: list[torch.Tensor]) -> None:
        vector = torch.cat(w).numpy()
        self._file.write(pickle.dumps((replica_group, rounds, counted, time.time(), vector)))

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def judge(folder: Path, happened: list[tuple[str, float]], wrong: list[str]) -> Outcome:
    """Judge a run by the definition of a round.

    All ranks that use the result of a round hold the same bits: the mean over the groups that counted.
    """
    if (folder / "left").exists():
        wrong.append((folder / "left").read_text().strip())
    events = event_log.read(folder / "events.jsonl")
    commits = [event for event in events if event["event"] == "commit"]
    took, brought = _gather(folder)
    for commit in commits:
        rounds, counted = commit["rounds"], tuple(commit["counted"])
        results = took.get(rounds, [])
        if any(theirs != counted for theirs, _ in results):
            wrong.append(f"round {rounds}: not all agree on who counted")
        if len({vector.tobytes() for _, vector in results}) > 1:
            wrong.append(f"round {rounds}: not the same bits")
        if results:
            mean = np.mean([_brought(brought[i], rounds, commit["unix"]) for i in counted], axis=0)
            if not np.allclose(results[0][1], mean, rtol=1e-5, atol=1e-5):
                wrong.append(f"round {rounds}: not the mean of {counted}")
    if set(took) - {commit["rounds"] for commit in commits}:
        wrong.append("somebody took a round that was never committed")
    if not any(event["event"] == "finished" for event in events):
        wrong.append("never finished")
    standstill = []
    for kind, at in happened:
        later = [commit["unix"] - at for commit in commits if commit["unix"] > at]
        if later:
            standstill.append((kind, min(later)))
    return Outcome(wrong, standstill, len(commits))


def _gather(folder: Path) -> tuple[dict[int, list[tuple[tuple[int, ...], Any]]], dict[int, list[Any]]]:
    """Return the parameters after and before the synchronizations.

    The first dictionary has, by round, the groups that counted and the parameters after it. The second has,
    by group, tuples of the round (0 if the rank did not complete it), the time, and the parameters before it.
    """
    took: dict[int, list[tuple[tuple[int, ...], Any]]] = {}
    brought: defaultdict[int, list[Any]] = defaultdict(list)
    for path in sorted(folder.glob("frames-*")):
        last = None
        for replica_group, rounds, counted, at, vector in _frames(path):
            if rounds:
                took.setdefault(rounds, []).append((counted, vector))
                if last is not None:
                    brought[replica_group].append((rounds, *last))
                last = None
            else:
                last = at, vector
        if last is not None:
            brought[int(path.name.split("-")[1])].append((0, *last))
    return took, brought


def _frames(path: Path) -> list[Any]:
    frames = []
    with path.open("rb") as file:
        while True:
            try:
                frames.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return frames


def _brought(by_group: list[Any], rounds: int, committed: float) -> Any:
    """Return the parameters with which a group entered this round.

    A group that was killed or evicted during the round has no frame after it. For such a group these are the
    parameters of its last frame before the commit.
    """
    exact = [vector for known, _, vector in by_group if known == rounds]
    before = [(at, vector) for _, at, vector in by_group if at < committed]
    return exact[0] if exact else max(before, key=lambda entry: entry[0])[1]
