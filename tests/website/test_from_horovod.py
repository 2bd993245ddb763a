"""The page for users of Horovod has all of its names; what it says to write instead works on four ranks."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest

import hpcsgd
import programs
from launchers import Launcher, by_each_launcher
from pythons import python
from train.launches import unlaunched

PAGE = (Path(__file__).parents[2] / "docs/from-horovod.md").read_text()
SCRIPT = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

HOROVOD = re.findall(
    r"\w+",
    """
    Adasum Average Compression DistributedOptimizer Max Min ProcessSet Product Sum SyncBatchNorm
    add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
    allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_
    broadcast_object broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built
    ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async
    grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
    grouped_reducescatter grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built
    mpi_enabled mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async
    remove_process_set rocm_built shutdown size sparse_allreduce_async start_timeline stop_timeline
    synchronize
    """,
)
"""The public names of `horovod.torch`, of version 0.28."""
ON_RANK_1: dict[str, object] = {
    "hosts = topology.world.gather_objects(platform.node())": ["the host"] * 4,
    "hosts.count(platform.node())": 4,
    "list(dict.fromkeys(hosts)).index(platform.node())": 0,
    "len(set(hosts))": 1,
    "hpcsgd.allreduce(x, topology)": [1.5, 2.5, 3.5, 4.5],
    '-hpcsgd.allreduce(-x, topology, op="max")': [0, 1, 2, 3],
    "dist.all_reduce(x, dist.ReduceOp.PRODUCT)": [0, 24, 120, 360],
    "hpcsgd.broadcast(x, topology)": [0, 1, 2, 3],
    "torch.cat(topology.world.gather_objects(x))": [0, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5, 3, 4, 5, 6],
    "topology.world.gather_objects(x)": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
    "dist.all_to_all_single(out := torch.empty_like(x), x)": [1, 2, 3, 4],
    "dist.reduce_scatter_tensor(out := x.new_empty(len(x) // topology.world_size, *x.shape[1:]), x)": [10],
    "hpcsgd.barrier(topology)": None,
    "x.copy_(hpcsgd.allreduce(x, topology))": [1.5, 2.5, 3.5, 4.5],
    "x.copy_(hpcsgd.broadcast(x, topology))": [0, 1, 2, 3],
    "[hpcsgd.allreduce(x, topology) for x in xs]": [[1.5, 2.5, 3.5, 4.5]] * 2,
    "handle = dist.all_reduce(x, async_op=True)": [6, 10, 14, 18],
    "handle.is_completed()": True,
    "handle.wait()": True,
    "dist.new_group([0, 1])": 2,
}
"""What each line of the page gives on rank 1 of 4, for which x is 1, 2, 3, 4; on rank 0 it is 0, 1, 2, 3."""


@pytest.mark.slow
@by_each_launcher
def test_the_script_runs(by: Launcher, tmp_path: Path) -> None:
    (script,) = SCRIPT.findall(PAGE)
    (tmp_path / "train.py").write_text(script)
    done = programs.run(by("train.py"), cwd=tmp_path, env=unlaunched())
    assert re.fullmatch(r"mean loss \d\.\d\d\n", done.stdout)


def is_on_page(name: str) -> bool:
    """Return whether the page has `name`, or that of which `name` is the asynchronous form."""
    names = {name, name.removesuffix("_").removesuffix("_async")}
    return any(re.search(rf"\bhvd\.{each}\b", PAGE) for each in names)


def test_each_name_of_horovod_is_on_the_page() -> None:
    assert "and other names with `_async`" in PAGE
    assert [name for name in HOROVOD if not is_on_page(name)] == []


@pytest.mark.slow
def test_what_the_page_says_to_write_works() -> None:
    shown = set(re.findall(r"`([^`]+)`", PAGE.split("| Horovod | hpcsgd |")[1]))
    assert ON_RANK_1.keys() <= shown
    of_others = re.compile(r"(?!.*hvd\.).*\b(dist|handle|hosts|topology\.world)\b.*\(")
    assert {line for line in shown if of_others.match(line)} <= ON_RANK_1.keys()
    lines = json.dumps(list(ON_RANK_1))
    script = str(Path(__file__).with_name("horovod_calls.py"))
    done = programs.run([programs.mpiexec(), "-n", "4", *python(script, lines)])
    assert dict(zip(ON_RANK_1, json.loads(done.stdout), strict=True)) == ON_RANK_1


def test_the_names_exist() -> None:
    names = set(re.findall(r"\bhpcsgd((?:\.\w+)+)\(", PAGE))
    assert len(names) > 8
    for name in names:
        functools.reduce(getattr, name[1:].split("."), hpcsgd)
    topology = set(re.findall(r"`topology\.(\w+)`", PAGE))
    assert topology >= {"rank", "world_size", "local_rank"}
    fields = {*vars(hpcsgd.Topology), *hpcsgd.Topology.__dataclass_fields__}
    assert topology <= fields
