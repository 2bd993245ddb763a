"""Jobs of three processes that fail, where each process has a test device of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import far
from comm.jobs import KILLED, LIMIT, Job, launch
from far.ranks import is_far

pytestmark = pytest.mark.slow

PATH = f"""
import contextlib, sys
sys.path.insert(0, {str(Path(far.__file__).parents[1])!r})
"""
DEVICE = f"""{PATH}
import far
far.prepare()
on = contextlib.ExitStack()
on.enter_context(far.switched_on())
"""
BEGIN = """
from far.ranks import place
device = place(world)

def work_on_devices():
    x = torch.ones(1000, device=device)
    while True:
        world.allreduce(x, "mean").wait()
        assert float(x.sum()) == 1000

x = torch.ones(1000, device=device)
world.allreduce(x).wait()
assert float(x.sum()) == 3000
fault()
"""
ENDS = {
    "killed": ("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n", 60, ""),
    "stopped": ("if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n", 2, "no answer within 2 s"),
    "a device that does nothing any more": (
        "if rank == 1:\n    torch.ops.far.hold(device.index, 0, True)\n", 2, "no answer within 2 s",
    ),
    "an exception": ("if rank == 1:\n    raise KeyError('x')\n", 60, "hpcsgd: rank 1: KeyError"),
}  # fmt: skip


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("name", ["killed", "an exception"])
def test_all_ranks_end_in_mid_step(name: str, tmp_path: Path) -> None:
    fault, timeout, message = ENDS[name]
    first = DEVICE if is_far() else PATH
    job = launch(tmp_path, f"{BEGIN}{fault}work_on_devices()", first=first, timeout=timeout, n=3)
    assert job.code in {1, 69} | KILLED, job
    assert job.seconds < LIMIT, job
    assert len(told(job)) <= 1, job
    assert not message or message in told(job)[0], job


@pytest.mark.usefixtures("far_device")
@pytest.mark.parametrize("name", ["stopped", "a device that does nothing any more"])
def test_all_ranks_end(name: str, tmp_path: Path) -> None:
    fault, timeout, message = ENDS[name]
    job = launch(tmp_path, f"{BEGIN}{fault}work_on_devices()", first=DEVICE, timeout=timeout, n=3)
    assert job.code in {1, 69} | KILLED, job
    assert job.seconds < LIMIT + (timeout if timeout < 60 else 0), job
    assert len(told(job)) <= 1, job
    assert not message or message in told(job)[0], job


@pytest.mark.usefixtures("far_device")
def test_ctrl_c(tmp_path: Path) -> None:
    job = launch(tmp_path, f"{BEGIN}work_on_devices()", first=DEVICE, n=3, interrupt=True)
    assert job.code != 0
    assert job.seconds < LIMIT
    assert [line for line in told(job) if "interrupted" in line] == told(job), job
    assert told(job)


def told(job: Job) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("hpcsgd:")]
