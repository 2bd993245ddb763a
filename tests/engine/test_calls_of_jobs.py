"""MPI jobs whose ranks make different calls end within seconds, with one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import programs
from pythons import python

SCRIPT = """
import torch
import hpcsgd

topology = hpcsgd.init(groups={groups}, timeout_s=300)
model = torch.nn.Linear(3, 2)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hpcsgd.DistributedOptimizer(inner, model, topology, hpcsgd.{method})

def train(steps):
    for _ in range(steps):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

train(3)
{body}
"""
CASES = {  # number of groups, code after three steps, and the expected message
    "clips alone": (
        1,
        "model(torch.ones(4, 3)).sum().backward()\n"
        "if topology.rank == 0: optimizer.clip_grad_norm_(1.0)\n"
        "optimizer.step()",
        "rank 0 is in clip_grad_norm_() after 3 updates, but rank 1 is in step() after 3 updates",
    ),
    "evaluates alone": (
        1,
        "if topology.rank == 0:\n    with optimizer.averaged_model(): pass\ntrain(3)",
        "rank 0 is in averaged_model() after 3 updates, but rank 1 is in step() after 3 updates",
    ),
    "saves alone": (
        1,
        "if topology.rank == 1: optimizer.state_dict()\ntrain(3)",
        "rank 0 is in step() after 3 updates, but rank 1 is in state_dict() after 3 updates: all ranks have "
        "to make the same calls in the same order, for the same number of batches; so that one rank alone "
        "may call state_dict(), call optimizer.consolidate_state_dict() on all ranks before",
    ),
    "saves alone at the end": (
        1,
        "if topology.rank == 0: optimizer.state_dict()",
        "rank 1 has left after step() of step 3, and rank 0 waits for it in state_dict() of step 4 (which "
        "needs all ranks, or consolidate_state_dict() on all ranks before)",
    ),
    "saves alone before a barrier": (
        1,
        "if topology.rank == 0: optimizer.state_dict()\nhpcsgd.barrier(topology)",
        "state_dict() of step 4 (which needs all ranks, or consolidate_state_dict() on all ranks before)",
    ),
    "half of four saves before a barrier": (
        2,
        "if topology.rank == 0: optimizer.state_dict()\nhpcsgd.barrier(topology)",
        "state_dict() of step 4 (which needs all ranks, or consolidate_state_dict() on all ranks before)",
    ),
    "has fewer batches": (
        1,
        "train(5 if topology.rank == 0 else 3)",
        "rank 1 has left after step() of step 6, and rank 0 waits for it in backward() of step 7",
    ),
    "half of four evaluates": (
        2,
        "train(0 if topology.shard_index else 3)\nwith optimizer.averaged_model(): pass",
        "rank 0 is in step() after 3 updates, but rank 1 is in averaged_model() after 3 updates",
    ),
    "group has fewer batches": (
        2,
        "train(5 if topology.rank == 0 else 3)",
        "rank 1 has left after step() of step 6, and rank 0 waits for it in step() of step 8",
    ),
    "group leaves a batch out": (
        2,
        "train(2 if topology.rank else 3)\noptimizer.average_models()\ntrain(9)",
        "rank 0 is in step() of step 6",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_line_and_the_end_of_all(case: str, tmp_path: Path) -> None:
    groups, body, line = CASES[case]
    script = tmp_path / "job.py"
    n, method = (4, "bsp()") if "four" in case else (2, "hierarchical(sync_every=2)")
    script.write_text(SCRIPT.format(groups=groups, body=body, method=method))
    began = time.monotonic()
    done = programs.run([programs.mpiexec(), "-n", str(n), *python(str(script))], check=False, timeout=60)
    assert done.returncode != 0
    told = [text for text in done.stderr.splitlines() if text.startswith("hpcsgd:")]
    assert len(told) == 1, done.stderr
    assert line in told[0]
    assert time.monotonic() - began < 30, "the timeout of the job is 300 s"
