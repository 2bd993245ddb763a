"""Tests of torch's device mesh over our ranks: `fully_shard` in groups, and how such jobs end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm.jobs import KILLED, LIMIT, Job, launch
from far.ranks import place
from hpcsgd.comm import Communicator, PeerLost, last_words, mesh, threads
from hpcsgd.core.topology import form
from hpcsgd.errors import JobError, UserError

pytestmark = pytest.mark.slow

GROUPS = "from hpcsgd.core.topology import form\ntopology = form(world, groups={P})\n"
SHARDED = """
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

def sharded():
    model = network()
    for layer in (*(each for each in model if isinstance(each, nn.Linear)), model):
        fully_shard(layer, mesh=topology.mesh()["shard"])
    return model, optim.AdamW(model.parameters(), lr=0.1)
"""
LOCAL_SGD = """
import hpcsgd

def trained(model, optimizer, after_update):
    for t in range(1, 7):
        generator = torch.Generator().manual_seed(100 * t + rank)
        model(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_update(t)

def meet(t):
    for p in theirs.parameters() if t % 2 == 0 else ():
        shard = p.to_local().detach()
        topology.inter_group.allreduce(shard.view(-1), "mean").wait()

with torch.device("meta"):
    mesh = topology.mesh()
theirs, optimizer = sharded()
trained(theirs, optimizer, meet)
ours = network()
optimizer = optim.AdamW(ours.parameters(), lr=0.1)
optimizer = hpcsgd.DistributedOptimizer(optimizer, ours, topology, hpcsgd.hierarchical(sync_every=2))
trained(ours, optimizer, lambda t: None)
for p, q in zip(theirs.parameters(), ours.parameters()):
    assert p.to_local().numel() < q.numel(), "it is not sharded"
    torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=0, atol=1e-12)

assert mesh is topology.mesh() and mesh.mesh_dim_names == ("replicate", "shard")
assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
assert (mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")) == (
    topology.group_index, topology.shard_index
)
fault()
"""
ENDLESS = """
import hpcsgd

model, optimizer = sharded()
optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.hierarchical(sync_every=2))
def work():
    model(torch.ones(4, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
work()
fault()
"""


def test_local_sgd_of_groups_that_shard_everything_is_hierarchical_local_sgd(tmp_path: Path) -> None:
    job = launch(tmp_path, GROUPS.format(P=2) + SHARDED + LOCAL_SGD, n=4)
    assert (job.code, job.stderr) == (0, ""), job


def test_a_default_group_of_the_same_ranks_serves(tmp_path: Path) -> None:
    job = launch(
        tmp_path,
        GROUPS.format(P=2)
        + f"""
import torch.distributed as dist
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
theirs = dist.group.WORLD
fault()
assert topology.mesh().mesh.tolist() == [[0], [1]]
assert dist.group.WORLD is theirs
""",
        n=2,
    )
    assert (job.code, job.stderr) == (0, ""), job


REFUSED = {
    "of other ranks": (
        'dist.init_process_group("gloo", store=dist.FileStore({store!r}, 2), rank=1 - rank, world_size=2)',
        "a default group in which this is rank 1 of 2; for hpcsgd it is rank 0 of 2",
    ),
    "of some ranks": (
        'if rank == 1:\n    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)',
        "torch.distributed has a default group on 1 of 2 ranks: all or none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_default_group_is_refused(name: str, tmp_path: Path) -> None:
    theirs, message = REFUSED[name]
    first = "import torch.distributed as dist\n" + theirs.format(store=str(tmp_path / "store"))
    job = launch(tmp_path, GROUPS.format(P=2) + first + "\nfault()\ntopology.mesh()\n", n=2)
    assert job.code in {1} | KILLED, job
    assert message in job.stderr, job


def test_hosts_whose_names_nobody_knows(tmp_path: Path) -> None:
    names = "import socket\nsocket.gethostname = lambda: f'node{rank}.invalid'\n"
    names += "os.environ.pop('GLOO_SOCKET_IFNAME', None)\n"
    job = launch(tmp_path, GROUPS.format(P=2) + names + "fault()\ntopology.mesh()\n", n=2)
    assert job.code in {1} | KILLED, job
    (line,) = told(job)
    assert "no address for this host, 'node0.invalid'" in line, job
    assert "set GLOO_SOCKET_IFNAME" in line, job
    assert "Traceback" not in job.stderr, job


def test_threads_have_no_mesh() -> None:
    def refused(world: Communicator) -> bool:
        with pytest.raises(JobError, match="ranks are threads here"):
            form(world).mesh()
        return True

    assert threads.run(2, refused) == [True, True]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (PeerLost("no answer"), True),
        (dist.DistNetworkError("a host that is gone"), True),
        (
            RuntimeError("[gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
            True,
        ),
        (
            RuntimeError("[gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"),
            True,
        ),
        (RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] length <= nbytes. 8 vs 4"), False),
        (dist.DistBackendError("NCCL error: invalid usage"), False),
        (RuntimeError("Timed out waiting for the user"), False),
    ],
)
def test_what_is_a_rank_that_was_lost(error: BaseException, lost: bool) -> None:
    assert last_words.is_loss(error) == lost


ENDS = {
    "an exception": ("if rank == 1:\n    raise KeyError('x')\n", 60, "hpcsgd: rank 1: KeyError"),
    "sys.exit": ("if rank == 1:\n    sys.exit(3)\n", 60, ""),
    "killed": ("if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n", 60, ""),
    "stopped": ("if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n", 2, "Timed out waiting 2000ms"),
}


@pytest.mark.parametrize(
    "name", [name if name == "an exception" else pytest.param(name, marks=pytest.mark.long) for name in ENDS]
)
def test_in_the_midst_of_a_collective_of_torch(name: str, tmp_path: Path) -> None:
    fault, timeout, message = ENDS[name]
    body = GROUPS.format(P=2) + SHARDED + ENDLESS + fault + "while True:\n    work()\n"
    job = launch(tmp_path, body, timeout=timeout, n=4)
    assert job.code in {1, 3, 69} | KILLED, job
    assert job.seconds < LIMIT + (timeout if timeout < 60 else 0), job
    assert len(told(job)) <= 1, job
    assert not message or message in told(job)[0], job
    assert job.stderr.count("Traceback") == ("KeyError" in message), job


@pytest.mark.long
def test_ctrl_c(tmp_path: Path) -> None:
    body = GROUPS.format(P=2) + SHARDED + ENDLESS + "while True:\n    work()\n"
    job = launch(tmp_path, body, n=4, interrupt=True)
    assert job.code != 0
    assert job.seconds < LIMIT
    assert ["interrupted" in line for line in told(job)] == [True], job


def told(job: Job) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("hpcsgd:")]


def test_ranks_that_share_a_gpu_are_reported_before_nccl_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reports "Duplicate GPU detected" only when it is first used, among many lines."""
    monkeypatch.setattr(mesh, "missing", lambda library: "")
    gpus = ["node A", "node B", "node C", "node B"]
    monkeypatch.setattr(mesh, "_accelerator_of", lambda world, kind: gpus[world.rank])

    def asked(world: Communicator) -> None:
        mesh.require_possible(world, "cuda")

    told = "mesh of 'cuda' devices: ranks 1 and 3 share a GPU, and NCCL wants one for each rank"
    with pytest.raises(UserError, match=f"^{told}$"):
        threads.run(4, asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_mesh_of_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch was built with NCCL, its own error is a traceback."""
    monkeypatch.setattr(mesh, "missing", lambda library: "")
    told = "mesh of 'cuda' devices: torch sees none here"
    with pytest.raises(UserError, match=f"^{told}"):
        threads.run(2, lambda world: mesh.require_possible(world, "cuda"))
    monkeypatch.setattr(mesh, "_accelerator_of", lambda world, kind: ["node A", ""][world.rank])
    with pytest.raises(UserError, match=r"^mesh of 'cuda' devices: torch sees none "):
        threads.run(2, lambda world: mesh.require_possible(world, "cuda"))


def test_ranks_on_the_host_share_nothing() -> None:
    assert threads.run(2, lambda world: mesh._accelerator_of(world, "cpu")) == ["", ""]


@pytest.mark.usefixtures("far_device")
def test_a_device_is_distinguished_from_those_of_other_ranks() -> None:
    def own(world: Communicator) -> str:
        place(world)
        return mesh._accelerator_of(world, "far")

    assert len(set(threads.run(3, own))) == 3
