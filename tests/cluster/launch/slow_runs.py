"""A run of replica groups that does not end before the test allows it, and its processes."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

from train.launches import make_store

EPOCHS, TRAIN = 30, 96

NET = '''
import os
import time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    """Slow until the file `slowly` is gone: whoever watches the run has all the time."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(36, 10))

    def forward(self, x):
        if self.training and Path("slowly").exists():
            time.sleep(0.5)
        return self.inner(x)


def watched(x, generator):
    """As it is, writing down which samples came by."""
    with open(f"seen-{os.getpid()}", "a") as file:
        file.writelines(row.numpy().tobytes().hex() + "\\n" for row in x)
    return x
'''

JOB = f"""
data = {{ path = "small.h5", group_batch_size = 8, transform = "net:watched" }}
model = {{ name = "net:Net" }}
optimizer = {{ lr = 0.1 }}
method = {{ name = "ensemble_sync", sync_every = 3 }}
training = {{ epochs = {EPOCHS}, log_every = 1 }}
"""


def prepare(folder: Path) -> None:
    """Write all files that the job needs into `folder`."""
    make_store(folder / "small.h5", TRAIN, 20)
    (folder / "net.py").write_text(NET)
    (folder / "job.toml").write_text(JOB)
    (folder / "slowly").touch()


def hurry(folder: Path) -> None:
    (folder / "slowly").unlink()


def seen(folder: Path) -> Counter[str]:
    """Return how often each sample was read."""
    return Counter("".join(path.read_text() for path in folder.glob("seen-*")).split())


def at_work(folder: Path) -> dict[int, dict[str, str]]:
    """Return the processes in this folder, except zombies, with their environments."""
    found: dict[int, dict[str, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink() == folder:
                words = (entry / "environ").read_text(errors="replace").split("\0")
                found[int(entry.name)] = dict(word.split("=", 1) for word in words if "=" in word)
    return found


def is_of(replica_group: int, env: dict[str, str]) -> bool:
    invited = env.get("HPCSGD_REPLICA_GROUP")
    return invited is not None and json.loads(invited)["replica_group"] == replica_group
