"""Tests of the local-step ratio: a step is local if the groups exchange nothing in it, with any method."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.report.summary import summary, summary_text
from train.launches import JOB, make_store
from train.test_loop import TEST, TRAIN, train

STEPS = 12
DECAY = (
    "--lr_schedule.name MultiStepLR --lr_schedule.arguments {milestones=[5],gamma=0.5} "
    "--lr_schedule.interval step "
)
ALONE = {
    "--method.name hierarchical --method.sync_every 2": 6,
    "--method.name hierarchical --method.sync_every 5": 10,
    "--method.name bsp --method.sync_every!": 0,
    DECAY + "--method.name post_local --method.sync_every 2": 3,  # 1 to 6 are synchronous; 8, 10, 12 sync
    '--method.name switch --method.first {name="bsp"} --method.then {name="hierarchical",sync_every=3}'
    " --method.at 4 --method.sync_every!": 5,
    '--method.name delayed --method.method {name="hierarchical",sync_every=2} --method.sync_delay 1'
    " --method.sync_every!": 7,
    '--method.name streaming --method.method {name="hierarchical",sync_every=4} --method.num_fragments 2'
    " --method.sync_delay 1 --method.sync_every!": 7,  # 3, 5, … 11 end; one begun after 12 does not
    "--method.name sgp --method.sync_every!": 0,
    "--method.name ssp --method.max_staleness 1 --method.sync_every!": 0,
    "--method.name selsync --method.delta 1e300 --method.sync_every!": 11,
    "--method.name selsync --method.delta 1e300 --method.aggregate gradients --method.sync_every!": 11,
    "--method.name selsync --method.delta 0 --method.aggregate gradients --method.sync_every!": 0,
}


@pytest.mark.parametrize("words", ALONE)
def test_steps_made_alone(tmp_path: Path, words: str) -> None:
    make_store(tmp_path / "small.h5", TRAIN, TEST)
    job = JOB.replace("sync_every = 2\n", "") if "every!" in words else JOB
    (tmp_path / "job.toml").write_text(job)
    usual = "--parallel.groups 2 --data.group_batch_size 4 --training.epochs 2 --training.log_every 5"
    records = train(
        tmp_path / "job.toml", tmp_path / "run", f"{usual} {words.replace('--method.sync_every!', '')}", n=2
    )
    assert summary(records)["steps"] == STEPS
    assert summary(records)["lssr"] == pytest.approx(ALONE[words] / STEPS)
    told = summary_text(summary(records))
    assert (f"{ALONE[words] / STEPS:.1%} of steps were local" in told) == (ALONE[words] > 0)
