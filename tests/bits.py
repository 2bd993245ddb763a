"""Print a fingerprint of short trainings by every method; refactoring the code must not change it.

A fingerprint covers the parameters after each step, the method's metrics except seconds, and the bytes sent
in each phase. Methods whose numbers depend on the order in which messages arrive have none. Fingerprints
depend on the version of torch and the kind of processor: compare two commits on one machine.

    PYTHONPATH=. python tests/bits.py --json before.json
    PYTHONPATH=. python tests/bits.py --against before.json
    PYTHONPATH=. mpiexec -n 4 python tests/bits.py --json mpi.json bsp diloco delayed

Ranks are threads, or MPI processes if a launcher starts the program.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn, optim

import hpcsgd
from hpcsgd.comm import Communicator, threads
from hpcsgd.core.topology import Topology, form
from hpcsgd.methods import (
    Method,
    allreduce_local_sgd,
    bsp,
    delayed,
    des_loc,
    diloco,
    hierarchical,
    osgp,
    selsync,
    sparseloco,
    streaming,
    switch,
)
from hpcsgd.parts import quantizers
from hpcsgd.parts.sparsifiers import TopK
from methods.table import OF_INTERVALS, REFERENCES
from ranks import LAUNCHED, RANK, RANKS

STEPS = 9
DECAYED = 6
"""The first step at half the learning rate."""
SHAPES = ((2, 2), (3, 1))
OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
}
PLAIN = {"sgd": lambda params: optim.SGD(params, lr=0.1)}
BUCKET_MB = {"sgd": 1e-4, "adamw": 1.0}
"""The bucket size for each optimizer: one gives many buckets, the other a single bucket."""


@dataclass(frozen=True)
class Entry:
    """A way to make a method, with the topology and the optimizers that it is for."""

    new: Callable[[], Method]
    form: Callable[[Communicator, int], Topology] = form
    plain_sgd: bool = False


def _late(make: Callable[[int], Method]) -> Method:
    return delayed(make(3), 2)


MORE: Mapping[str, Callable[[], Method]] = {
    "allreduce_local_sgd, reset": lambda: allreduce_local_sgd(2, optimizer_state=hpcsgd.ResetState),
    "delayed diloco in few bits": lambda: delayed(diloco(3, quantize=quantizers.int8()), 3),
    **{f"delayed {name}": partial(_late, make) for name, make in OF_INTERVALS.items()},
    "delayed selsync": lambda: delayed(selsync(0.3), 1),
    "delayed sparseloco": lambda: delayed(sparseloco(3, density=0.2), 2),
    "des_loc of one interval": lambda: des_loc(2, 2, 2),
    "diloco in few bits": lambda: diloco(2, quantize=quantizers.int4()),
    "diloco, averaged": lambda: diloco(2, optimizer_state=hpcsgd.AverageState),
    "hierarchical in few bits alone": lambda: hierarchical(2, quantize=quantizers.int8()),
    "hierarchical with Top-k": lambda: hierarchical(2, grad_reduce=hpcsgd.Sparse(TopK(0.2))),
    "hierarchical, averaged": lambda: hierarchical(2, optimizer_state=hpcsgd.AverageState),
    "hierarchical, reset": lambda: hierarchical(2, optimizer_state=hpcsgd.ResetState),
    "selsync, averaged": lambda: selsync(0.3, optimizer_state=hpcsgd.AverageState),
    "streamed at once": lambda: streaming(hierarchical(4), 2, 0),
    "streamed in few bits": lambda: streaming(diloco(4, quantize=quantizers.int8()), 2, 1),
    "streamed sparseloco": lambda: streaming(sparseloco(4, density=0.2), 2, 1),
    "streamed, as late as can be": lambda: streaming(diloco(4), 4, 4),
    "switch from allreduce_local_sgd": lambda: switch(allreduce_local_sgd(2), allreduce_local_sgd(3), 5),
    "switch from delayed": lambda: switch(delayed(diloco(3), 2), bsp(), 5),
    "switch from a switch": lambda: switch(
        switch(osgp(1), hierarchical(2), 3), delayed(hierarchical(2), 1), 5
    ),
    "switch from des_loc": lambda: switch(des_loc(3, 2, 4), des_loc(2, 3, 4), 4),
    "switch from osgp": lambda: switch(osgp(2), hierarchical(2), 5),
    "switch from streamed at once": lambda: switch(streaming(diloco(4), 2, 0), bsp(), 4),
    "switch from streamed": lambda: switch(streaming(diloco(3), 2, 2), streaming(hierarchical(4), 2, 1), 5),
}
ENTRIES: Mapping[str, Entry] = {
    **{
        label: Entry(case.new, case.form, case.plain_sgd)
        for label, case in REFERENCES.items()
        if case.same_bits
    },
    **{label: Entry(new) for label, new in MORE.items()},
}


def model() -> nn.Module:
    """Return a model with the same parameters on all machines, whose random numbers may differ."""
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.cos(torch.arange(p.numel(), dtype=p.dtype) * (i + 1)).view_as(p) / 3)
    return net


def fingerprint(world: Communicator, P: int, entry: Entry, optimizer: str) -> str:
    """Train for `STEPS` steps and return the fingerprint of this rank. Collective."""
    torch.manual_seed(0)
    net, found, before = model(), hashlib.sha256(), world.stats.totals()
    inner = (PLAIN if entry.plain_sgd else OPTIMIZERS)[optimizer](list(net.parameters()))
    made = hpcsgd.DistributedOptimizer(
        inner, net, entry.form(world, P), entry.new(), bucket_cap_mb=BUCKET_MB[optimizer]
    )

    def see(numbers: Mapping[str, float]) -> None:
        exact = sorted((name, x) for name, x in numbers.items() if not name.endswith("_seconds"))
        found.update(repr(exact).encode())
        for p in net.parameters():
            found.update(p.detach().numpy().tobytes())

    for t in range(STEPS):
        if t == DECAYED:
            for group in made.param_groups:
                group["lr"] /= 2
        made.zero_grad()
        loss = (net(batch(t, world.rank)) - 0.1 * world.rank).square().mean()
        loss.backward()
        made.step(loss=loss)
        see(made.metrics)
    made.average_models()
    see(made.metrics)
    with made.averaged_model() as D:
        see({"distance": D})
    sent = world.stats.since(before)
    # Communication threads add to these in any order, so that the sums differ by rounding.
    found.update(repr(sorted((name, round(x.bytes, 3)) for name, x in sent.items())).encode())
    return found.hexdigest()[:16]


def batch(t: int, rank: int) -> Tensor:
    return torch.sin(torch.arange(4 * 7, dtype=torch.float32).view(4, 7) * (1 + t) + rank)


def fingerprints(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and fingerprint of each training: each method, by each optimizer, on each shape.

    The fingerprint of a training joins those of all ranks.
    """
    for name in names:
        entry = ENTRIES[name]
        for optimizer in PLAIN if entry.plain_sgd else OPTIMIZERS:
            for P, K in [(2, RANKS // 2)] if LAUNCHED else SHAPES:
                yield f"{name}, {optimizer}, {P} × {K}", " ".join(_of_ranks(P, K, entry, optimizer))


def _of_ranks(P: int, K: int, entry: Entry, optimizer: str) -> list[str]:
    if not LAUNCHED:
        return threads.run(P * K, fingerprint, P, entry, optimizer)
    from hpcsgd.comm import mpi

    world = mpi.world()
    return world.gather_objects(fingerprint(world, P, entry, optimizer))


def differences(found: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Return the trainings of `found` that `before` has with another fingerprint, or does not have."""
    return [name for name, each in found.items() if before.get(name) != each]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help=f"one of {', '.join(ENTRIES)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the fingerprints here")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with these; exit code 1 if any differ"
    )
    given = parser.parse_args(words)
    if unknown := set(given.name) - ENTRIES.keys():
        parser.error(f"no such method: {', '.join(sorted(unknown))}")
    found: dict[str, str] = {}
    for name, each in fingerprints(given.name or list(ENTRIES)):
        found[name] = each
        if RANK == 0:
            print(f"{name}: {each}", flush=True)
    if RANK != 0:
        return 0
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.against is None:
        return 0
    other = differences(found, json.loads(given.against.read_text()))
    print(f"{len(found) - len(other)} of {len(found)} as before", *other, sep="\n  other than before: ")
    return int(bool(other))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.exit(main())
