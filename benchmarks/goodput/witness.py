"""A model and a method that record each step: its samples, and the parameters at synchronizations."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.faults_judge import Frames
from hpcsgd.core.averager import Traits, run_averager
from hpcsgd.core.method import Method
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import CommOp, ModelLayout
from hpcsgd.core.waits import Living
from hpcsgd.parts.averagers import ElasticMean
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.schedules import Every

INPUTS, CLASSES = 6, 3
"""The first input is the number of the sample."""
LIFE = "GOODPUT_LIFE"
_seen = threading.local()
"""For the rank that is this thread: the samples of each pass since the last synchronization."""


class Net(nn.Module):
    """A model with one matrix, which records the samples of its training passes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner = nn.Linear(INPUTS, CLASSES, bias=False)
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            passes(x[:, 0].long().tolist())
            time.sleep(self._seconds)
        return self.inner(features(x))


def features(x: Tensor) -> Tensor:
    """Return the inputs with the number of the sample, which is no feature, replaced by 1."""
    return torch.cat([torch.ones_like(x[:, :1]), x[:, 1:]], 1)


def passes(rows: list[int] | None = None) -> list[list[int]]:
    """Return the passes since the last synchronization, after adding one with `rows` if given."""
    if not hasattr(_seen, "rows"):
        _seen.rows = []
    if rows is not None:
        _seen.rows.append(rows)
    return _seen.rows


def watched(sync_every: int) -> Method:
    """Return `ensemble_sync` with an averager that records everything in this process's folder."""
    return Method(grad_reduce=Dense(), schedule=Every(sync_every), averager=Watched(ElasticMean()))


@dataclass(frozen=True)
class Watched:
    """An averager that writes a frame with the parameters before and after each synchronization."""

    inner: ElasticMean
    files: dict[str, Any] = field(default_factory=dict)
    traits = Traits(Living(), whole_model=True, elastic=True)

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        peers: Any = s.topology.replica_groups
        place = f"{peers.index}-{os.environ[LIFE]}-{s.topology.rank}"
        frames = self.files.setdefault("frames", Frames(Path(f"frames-{place}")))
        with Path(f"steps-{place}").open("ab", buffering=0) as steps:
            steps.write(pickle.dumps((s.t, list(passes()))))
        passes().clear()
        frames.write(peers.index, 0, (), [b.parameters for b in s.buckets])
        found = run_averager(self.inner, vectors, s)
        frames.write(peers.index, peers.rounds, peers.counted, [b.parameters for b in s.buckets])
        return found

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        return iter(self.inner.comm_ops(m))


def read(path: Path) -> Iterable[Any]:
    """Yield the objects pickled in a file, up to the point where the process was killed."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return
