"""A job, and a machine on which to run it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hpcsgd.config.schema import load
from hpcsgd.cost import machine as machines
from hpcsgd.cost.machine import Machine
from hpcsgd.train.training_profile import TrainingProfile, profile_of

JOB = """\
# of ours
seed = 1
[parallel]   # groups
group_size = 4
timeout_s = 60.0

[data]
path = "nowhere.h5"
group_batch_size = 64 # of a group
[model]
name = "mlp"
arguments = { inputs = 64, hidden = [512], classes = 10 }
[optimizer]
lr = 0.1
[optimizer.arguments]
momentum = 0.9
[method]
name = "hierarchical"
sync_every = 4
[method.grad_reduce]
name = "reduce_scatter"
[training] # the rest
epochs = 10
"""
MACHINE = """\
format = 1
[machine]
hosts = 16
ranks_per_host = 4
[compute]
batch_sizes = [64, 16]
forward_seconds_by_batch = [0.01, 0.0025]
backward_seconds_by_batch = [0.02, 0.005]
update_seconds_per_element = 1e-10
[[link]]
operation = "any"
kind = "inside"
alpha_seconds = [1e-6]
beta_seconds_per_byte = [2e-11]
relative_error = 0.1
[[link]]
operation = "any"
kind = "across"
alpha_seconds = [3e-6]
beta_seconds_per_byte = [8e-8]
relative_error = 0.1
"""


def machine_of() -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        file.write_text(MACHINE)
        return machines.load(file)


@pytest.fixture
def subject_of_ours(tmp_path: Path) -> TrainingProfile:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    return profile_of(load(job), samples=64_000)
