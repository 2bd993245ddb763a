"""Was a run of groups right? From what they wrote down, and from the coordinator's event log."""

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
    """What is wrong with a run, if anything, and how long progress stood still after each fault."""

    wrong: list[str] = field(default_factory=list)
    standstill: list[tuple[str, float]] = field(default_factory=list)
    rounds: int = 0


class Frames:
    """What a rank brought to meetings (rounds 0) and took from them; each frame is written at once."""

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
    """By the definition: all that took a round hold the same bits, the mean of those that counted."""
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
    """By round, who counted and what was taken; by group, (the round that took it or 0, when, what was
    brought)."""
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
    """To this round. Who was killed or evicted in the middle of it has not written down that it took it:
    then it is what it brought last."""
    exact = [vector for known, _, vector in by_group if known == rounds]
    before = [(at, vector) for _, at, vector in by_group if at < committed]
    return exact[0] if exact else max(before, key=lambda entry: entry[0])[1]
