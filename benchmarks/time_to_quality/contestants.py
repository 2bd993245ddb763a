"""The contestants of `time_to_quality.py`: methods of torch, torchft and hpcsgd, with default options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median

import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hpcsgd
from harness import Contestant, interleaved
from harness.timing import Ranks
from harness.workloads import fastest_ddp
from hpcsgd.parts import quantizers
from late_accuracy.training import rate
from time_to_quality.tasks import Task, loss_of

EVERY = 8
"""Steps between two averages of the models."""
OUTER_EVERY, FRAGMENTS = 16, 4
"""Steps between two averages with an outer optimizer, and number of fragments for streaming."""
DELTA = 0.3
"""The threshold δ of SelSync."""
BUCKETS = (1, 4, 25)
"""Bucket sizes in MB. DDP trains with the size that is fastest in a test before the training."""
DDP = "DDP"
Update = Callable[[Tensor, Tensor], None]
"""A function that makes one step on a rank's samples."""


@dataclass(frozen=True)
class Start:
    """What all contestants start from: a rank's own copy of the model, and the settings of the training."""

    task: Task
    model: nn.Module
    lr: float
    steps: int
    batch: tuple[Tensor, Tensor]
    """Samples with which a contestant may time steps before it trains, together with all `ranks`."""
    ranks: Ranks

    def optimizer(self, parameters: Iterable[nn.Parameter] | None = None) -> optim.Optimizer:
        return self.task.optimizer(self.model.parameters() if parameters is None else parameters, self.lr)

    def update(self, model: nn.Module, optimizer: optim.Optimizer, scheduled: optim.Optimizer) -> Update:
        """Return a step of `optimizer`; the learning rates are those of `scheduled`."""
        schedule = LambdaLR(scheduled, lambda t: rate((t + 1) / self.steps))

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            schedule.step()

        return step


Make = Callable[[Start, hpcsgd.Topology], Update]


def ours(method: Callable[[], hpcsgd.Method]) -> Make:
    def make(start: Start, topology: hpcsgd.Topology) -> Update:
        optimizer = hpcsgd.DistributedOptimizer(start.optimizer(), start.model, topology, method())
        return start.update(start.model, optimizer, optimizer)

    return make


def ddp(start: Start, _: hpcsgd.Topology) -> Update:
    """Return a step of DistributedDataParallel with the bucket size that is fastest here."""
    model, optimizer = fastest_ddp(start.model, fastest_bucket(start)), start.optimizer()
    return start.update(model, optimizer, optimizer)


def fastest_bucket(start: Start) -> float:
    x, y = start.batch

    def step(bucket: float) -> Callable[[], None]:
        model = fastest_ddp(start.task.build(), bucket)
        return lambda: loss_of(model, x, y).backward()

    blocks = interleaved({str(b): Contestant(step(b)) for b in BUCKETS}, rounds=3, ranks=start.ranks)
    return min(BUCKETS, key=lambda b: median(blocks[str(b)].wall))


def hooked(register: Callable[[DistributedDataParallel], None], bucket: float = 25) -> Make:
    def make(start: Start, _: hpcsgd.Topology) -> Update:
        model, optimizer = fastest_ddp(start.model, bucket), start.optimizer()
        register(model)
        return start.update(model, optimizer, optimizer)

    return make


def in_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def by_power_sgd(model: DistributedDataParallel) -> None:
    """Register PowerSGD of rank 1. It starts after two steps without compression, as it requires."""
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)


@functools.cache
def process_group(P: int, K: int, g: int) -> dist.ProcessGroup:
    """Return torch's process group of the ranks of group `g`; collective."""
    groups = [dist.new_group(range(i * K, (i + 1) * K)) for i in range(P)]
    mine = groups[g]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def post_local(start: Start, topology: hpcsgd.Topology) -> Update:
    """Return a step of PyTorch's local SGD: DDP in groups, and `PeriodicModelAverager` over all ranks."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415 - warns when it is imported

    group = process_group(topology.num_groups, topology.group_size, topology.group_index)
    model = fastest_ddp(start.model, 4)
    state = post_local_sgd.PostLocalSGDState(None, group, start_localSGD_iter=0)
    model.register_comm_hook(state, post_local_sgd.post_localSGD_hook)
    inner = start.optimizer()
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=0)
    return start.update(model, PostLocalSGDOptimizer(inner, averager), inner)


def streamed() -> hpcsgd.Method:
    method = hpcsgd.diloco(OUTER_EVERY, outer=outer, quantize=quantizers.int4(block=256))
    return hpcsgd.streaming(method, FRAGMENTS, sync_delay=1)


def outer(parameters: Iterable[Tensor]) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.7, momentum=0.8, nesterov=True)


PEERS: dict[str, Make] = {
    DDP: ddp,
    "DDP, fp16 hook": hooked(in_fp16),
    # Only one bucket: several would wait for each other forever, each on one of gloo's two threads.
    "DDP, PowerSGD hook": hooked(by_power_sgd, bucket=1000),
    "torch PostLocalSGD": post_local,
}
if find_spec("torchft"):
    from time_to_quality.fault_tolerant import diloco, local_sgd

    PEERS |= {"torchft LocalSGD": local_sgd(EVERY), "torchft DiLoCo": diloco(OUTER_EVERY, outer)}
OURS: dict[str, Make] = {
    "bsp": ours(hpcsgd.bsp),
    "bsp, int8": ours(lambda: hpcsgd.bsp(hpcsgd.Quantized(gradients=quantizers.int8()))),
    "hierarchical": ours(lambda: hpcsgd.hierarchical(EVERY)),
    "delayed": ours(lambda: hpcsgd.delayed(hpcsgd.hierarchical(EVERY), EVERY)),
    "selsync": ours(lambda: hpcsgd.selsync(DELTA)),
    "sgp": ours(hpcsgd.sgp),
    "streaming DiLoCo, int4": ours(streamed),
}
CONTESTANTS = PEERS | OURS
