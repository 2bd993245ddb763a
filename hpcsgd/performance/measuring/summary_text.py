"""Show measurements as a table, and derive advice for trainings on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hpcsgd.core.layout import bucket_bytes
from hpcsgd.cost.link_classes import LinkClass
from hpcsgd.cost.links import Link, Points
from hpcsgd.cost.machine import Machine
from hpcsgd.errors import count_text
from hpcsgd.performance.measuring.messages import Series

ASYMPTOTIC = 0.9
LARGE = 25_000_000
"""The number of parameters to assume if the model is not known."""
CLEAR = 1.1
WIDE = 0.5
"""Interquartile ranges and relative errors above this fraction are reported."""
HEAD = ("operation", "way", "ranks", "smallest", "bare", "alpha", "GB/s", "bare", "knees", "error")


def table(machine: Machine) -> str:
    """Return a table with a row per link: µs of the smallest messages, GB/s of the largest.

    Columns named "bare" are measured without the communication thread.
    """
    rows = [HEAD, *(_row(link, _of(machine, link)) for link in machine.link)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def answers(machine: Machine, measured: Sequence[Series]) -> Iterator[str]:
    """Yield advice for this machine, one line each, and warnings about unreliable measurements."""
    for way in _groups(machine):
        yield from _sendrecv(machine, way)
        bucket = _bucket(machine, way) / 1e6
        share = f"{ASYMPTOTIC:.0%} of the speed of the largest"
        yield f"{link_text(way)}: bucket_cap_mb = {bucket:.2g} or more reaches {share}"
    comm_threads = [p.seconds[0] - p.bare_seconds[0] for p in machine.points]
    if comm_threads:
        added = 1e6 * median(comm_threads)
        yield f"the communication thread adds {added:.0f} µs to a small message; computing goes on meanwhile"
    yield from _doubts(machine, measured)


def link_text(way: LinkClass) -> str:
    """Return a class of communicators as text, such as "4 ranks inside a host"."""
    where = "inside a host" if way.kind == "inside" else f"on {count_text(way.hosts, 'host')}"
    return f"{count_text(way.ranks, 'rank')} {where}" + (
        f", {way.at_once} at once" if way.at_once > 1 else ""
    )


def _of(machine: Machine, link: Link) -> list[Points]:
    return [
        p
        for p in machine.points
        if (p.operation, p.kind) == (link.operation, link.kind) and p.ranks in link.ranks
    ]


def _row(link: Link, points: Sequence[Points]) -> tuple[str, ...]:
    def microseconds(seconds: float) -> str:
        return f"{1e6 * seconds:.1f}"

    def rate(*times: float) -> str:
        return f"{median(p.bytes[-1] / t for p, t in zip(points, times, strict=True)) / 1e9:.2f}"

    return (
        link.operation,
        link.kind,
        ",".join(map(str, link.ranks)),
        microseconds(median(p.seconds[0] for p in points)),
        microseconds(median(p.bare_seconds[0] for p in points)),
        microseconds(link.alpha_seconds[0]),
        rate(*(p.seconds[-1] for p in points)),
        rate(*(p.bare_seconds[-1] for p in points)),
        " ".join(_size(knee) for knee in link.from_bytes[1:]) or "-",
        f"{link.relative_error:.0%}",
    )


def _groups(machine: Machine) -> list[LinkClass]:
    """Return the classes of communicators on which gradients are reduced."""
    return list(dict.fromkeys(p.link_class for p in machine.points if p.operation == "alltoall"))


def _sendrecv(machine: Machine, way: LinkClass) -> Iterator[str]:
    """Yield a line that says whether AllToAll or ReduceScatter is faster for a bucket of the model.

    After an all-to-all the ranks must also compute the mean.
    """
    if machine.compute is None:
        return
    model = 4 * (machine.compute.numel or LARGE)
    n = min(int(bucket_bytes(model)), model, _largest(machine, way))
    ours = machine.seconds("alltoall", n, way) + machine.compute.mean_seconds(n / 4)
    theirs = machine.seconds("reduce_scatter", n, way)
    ratio = max(ours, theirs) / min(ours, theirs)
    better = "AllToAll" if ours <= theirs else "ReduceScatter"
    advice = "AllToAll or ReduceScatter" if ratio < CLEAR else f"{better}, {ratio:.2f} times as fast,"
    yield (
        f"{link_text(way)}: {advice} for buckets of {_size(n)} "
        f"(alltoall and mean {1e3 * ours:.2f} ms, reduce_scatter {1e3 * theirs:.2f} ms)"
    )


def _bucket(machine: Machine, way: LinkClass) -> float:
    """Return the bytes of the smallest message that reaches `ASYMPTOTIC` of the best speed.

    Only the largest measured size and its repeated halvings are tried.
    """
    sizes = [_largest(machine, way) / 2**i for i in range(20, -1, -1)]
    speeds = [n / machine.seconds("alltoall", n, way) for n in sizes]
    return next(n for n, speed in zip(sizes, speeds, strict=True) if speed >= ASYMPTOTIC * max(speeds))


def _largest(machine: Machine, way: LinkClass) -> int:
    return max(p.bytes[-1] for p in machine.points if p.link_class == way and p.operation == "alltoall")


def _doubts(machine: Machine, measured: Sequence[Series]) -> Iterator[str]:
    scatter = {f"{s.points.operation}, {link_text(s.points.link_class)}": median(s.scatter) for s in measured}
    if wide := {name: value for name, value in scatter.items() if value > WIDE}:
        name, value = max(wide.items(), key=lambda item: item[1])
        yield (
            f"WARNING  repeats of {len(wide)} of {len(scatter)} series differ by more than {WIDE:.0%}, "
            f"{name} by {value:.0%}: is somebody else on these hosts, or their network?"
        )
    errors = {f"{link.operation} {link.kind}": link.relative_error for link in machine.link}
    if wide := {name: value for name, value in errors.items() if value > WIDE}:
        yield (
            "WARNING  lines miss one in ten points by more than a factor: "
            + ", ".join(f"{name} {1 + value:.2g}" for name, value in wide.items())
            + "; see the picture before you plan with them"
        )


def _size(nbytes: float) -> str:
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
