"""``hpcsgd measure``: measure messages and computing of these ranks, and write a machine file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hpcsgd.comm import Communicator, joining
from hpcsgd.comm.backend_choice import place_on_node
from hpcsgd.comm.streams import device_for
from hpcsgd.config.schema import Config
from hpcsgd.core.topology import form, raise_on_all_ranks
from hpcsgd.cost.machine import About, Machine, dump, versions
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import replacing
from hpcsgd.performance.measuring import computing, messages
from hpcsgd.performance.measuring.layout import courses
from hpcsgd.performance.measuring.messages import Series
from hpcsgd.performance.measuring.picture import draw
from hpcsgd.performance.measuring.summary_text import answers, table
from hpcsgd.performance.measuring.workload import Workload
from hpcsgd.train.process import join_world, keep_freed_memory, use_threads

LEAST_BYTES = 4096
"""The least allowed `max_bytes`, because smaller messages do not show the bandwidth."""


@dataclass(frozen=True)
class Extent:
    """The extent of a measurement: the largest message in bytes, and the approximate total seconds."""

    max_bytes: int
    seconds: float


FULL = Extent(max_bytes=64_000_000, seconds=220)
QUICK = Extent(max_bytes=16_000_000, seconds=33)
FOR_MESSAGES = 0.8
"""The share of the time that is for measuring messages. The rest is for measuring computation."""


def run(
    path: Path | None,
    read: Callable[[], Config] | None,
    *,
    out: Path,
    quick: bool,
    max_bytes: int | None,
    seconds: float | None,
) -> None:
    """Measure, write the machine file `out` and a picture next to it, and print a summary.

    Every rank calls this. `read` reads the job file at `path`, if one is given.
    """
    logging.getLogger("hpcsgd").setLevel(logging.ERROR)  # no warnings: all group sizes are tried, good or bad
    world, config = (joining.world(), None) if read is None else join_world(read)
    with raise_on_all_ranks(world, "preparing to measure"):
        extent = _extent(quick, max_bytes, seconds)
        _require_company(world.size)
        _require_writable(out)
    use_threads(None if config is None else config.training.threads)
    keep_freed_memory()
    machine, measured = measure(world, extent, config, str(path))
    if world.rank == 0:
        _write(machine, out)
        print(table(machine))
        print("\n".join(answers(machine, measured)))
        print(f"written {out} and {out.with_suffix('.png').name}")


def measure(
    world: Communicator, extent: Extent, config: Config | None = None, source: str = ""
) -> tuple[Machine, list[Series]]:
    """Return the content of a machine file and the measured times, the same on every rank. Collective.

    `config` is the content of the job file `source`, whose model is measured, too.
    """
    backend = world.backend
    world = form(world).world
    nodes = world.gather_objects(backend.node)
    with raise_on_all_ranks(world, "preparing the model"):
        workload = None if config is None else Workload(config, source, world)
    place, found = place_on_node(world), courses(nodes)
    measured = messages.measure(world, found, extent.max_bytes, FOR_MESSAGES * extent.seconds)
    machine = Machine(
        machine=About(
            hosts=len(set(nodes)),
            ranks_per_host=max(nodes.count(node) for node in set(nodes)),
            backend=backend.name.split(",")[0],
            device=(device_for("auto", place) if workload is None else workload.device).type,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
        ),
        compute=computing.measure(world, workload, (1 - FOR_MESSAGES) * extent.seconds),
        link=tuple(messages.links(measured)),
        points=tuple(series.points for series in measured),
    )
    return machine, measured


def _extent(quick: bool, max_bytes: int | None, seconds: float | None) -> Extent:
    given = {"max_bytes": max_bytes, "seconds": seconds}
    extent = replace(QUICK if quick else FULL, **{k: v for k, v in given.items() if v is not None})
    if extent.max_bytes < LEAST_BYTES:
        raise UserError(f"--max-bytes {extent.max_bytes}: at least {LEAST_BYTES} are needed")
    if not extent.seconds > 0:
        raise UserError(f"--seconds {extent.seconds:g}: more than 0 are needed")
    return extent


def _require_company(ranks: int) -> None:
    if ranks == 1:
        raise UserError("one rank has nobody to talk to: mpiexec -n 4 hpcsgd measure, or srun -n 4 ...")


def _require_writable(out: Path) -> None:
    """Raise `UserError` early if `out` cannot be written, because measuring takes minutes."""
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir() or out.suffix != ".toml":
        raise UserError(f"--out {out}: expected the name of a .toml file")


def _write(machine: Machine, out: Path) -> None:
    with replacing(out) as part:
        part.write_text(dump(machine), encoding="utf-8")
    with replacing(out.with_suffix(".png")) as part:
        draw(machine, part)
