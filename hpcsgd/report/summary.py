"""The numbers of a run, from all its records, for ``summary.json`` and for the lines at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from hpcsgd.errors import count_text
from hpcsgd.report.figures import FIGURES, found_in, speed_text, written
from hpcsgd.report.metrics import Record
from hpcsgd.report.totals import Totals

Summary = dict[str, Any]


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """Return the records of one kind, in order."""
    return [record for record in records if record["kind"] == kind]


def noted(records: Iterable[Record], *names: str) -> list[Record]:
    """Return the records of kind "method" that have all metrics called `names`."""
    return [record for record in of_kind(records, "method") if all(name in record for name in names)]


def summary(records: Iterable[Record]) -> Summary:
    """Return the numbers of a run by name, or None for those that no record has.

    Seconds are those of training steps, without evaluations and checkpoints.
    """
    return Totals.of(records).numbers()


def summary_text(numbers: Summary) -> str:
    """Return the lines that are printed at the end of a run, from the result of `summary`."""
    lines = [
        f"trained   {count_text(numbers['steps'], 'step')}, {count_text(numbers['epochs'], 'epoch')}, "
        f"{count_text(numbers['samples'], 'sample')}"
        f" in {timedelta(seconds=round(numbers['seconds']))}"
    ]
    if numbers["samples_per_s"] is not None:
        lines.append(f"speed     {speed_text(numbers)}{_model_work(numbers)}")
    if numbers["training_loss"] is not None:
        lines.append(f"loss      {numbers['training_loss']:.4g} in training")
    if numbers["loss"] is not None:
        lines.append(f"test      {_tested(numbers)}, loss {numbers['loss']:.4g}")
    if numbers["median_distance"] is not None:
        averages, D = count_text(numbers["model_averages"], "model average"), numbers["median_distance"]
        lines.append(
            f"sync      {averages}, median distance {D:.3g}; {numbers['lssr']:.1%} of steps were local"
        )
    elif numbers["lssr"]:
        lines.append(
            f"sync      {numbers['lssr']:.1%} of steps were local; in the others the groups shared gradients"
        )
    elif numbers["distance"]:
        lines.append(f"groups    at distance {numbers['distance']:.3g} from their mean at the last test")
    if "rounds" in numbers:
        lines.append(f"elastic   {_replica_groups(numbers)}")
    if numbers["mean_density"] is not None and numbers["mean_select_seconds"] is not None:
        taken = f"selected in {second_text(numbers['mean_select_seconds'])} a step"
        lines.append(f"sparse    {numbers['mean_density']:.3%} of the gradients sent, {taken}")
    if numbers["mean_staleness"] is not None:
        lines.append(
            f"stale     by {numbers['mean_staleness']:.2f} updates of others in the mean{_ahead(numbers)}"
        )
    if numbers["seconds_per_phase"]:
        lines.append(f"time      {_shares(numbers['seconds_per_phase'])}")
    if (traced := numbers.get("trace")) and traced["steps"]:
        lines.append(f"traced    {_traced(traced)}")
    if any(numbers["bytes_per_phase"].values()):
        sizes = (f"{phase} {byte_text(size)}" for phase, size in numbers["bytes_per_phase"].items())
        lines.append(f"sent      {', '.join(sizes)}")
    if numbers.get("bytes_by_torch"):
        size = byte_text(numbers["bytes_by_torch"])
        lines.append(f"FSDP      {size} sent by torch inside groups (computed, not measured)")
    if links := numbers["bytes_per_link"]:
        lines.append(
            f"links     from rank 0 to {count_text(len(links), 'group')}, "
            f"{byte_text(max(links.values()))} at most"
        )
    return "\n".join(lines)


def _model_work(numbers: Summary) -> str:
    """Return a text with the FLOPs per token, or per sample if samples have no tokens."""
    if numbers.get("flops") is None:
        return ""
    of = "tokens" if "tokens" in numbers else "samples"
    return f", {flop_text(numbers['flops'] / numbers[of])} a {of.removesuffix('s')}"


def _tested(numbers: Summary) -> str:
    first, *others = found_in([numbers])
    figure = FIGURES[first]
    best = f"best {figure.text(numbers[f'best_{first}'])} after epoch {numbers['best_epoch']}"
    more = "".join(f", {written({key: numbers[key]})}" for key in others)
    return f"{written({first: numbers[first]})} ({best}){more}"


def _replica_groups(numbers: Summary) -> str:
    rounds = count_text(numbers["rounds"], "round")
    lost, returned, left, late = (
        count_text(numbers[f"groups_{what}"], "time") for what in ("lost", "returned", "left", "late")
    )
    text = f"{rounds}, lost {lost}, returned {returned}"
    text = f"{text}, left {left}" if numbers["groups_left"] else text
    return f"{text}, late {late}" if numbers["groups_late"] else text


TOLD = 0.02
"""Phases that take less than this fraction of the traced communication are not printed."""


def _traced(found: Summary) -> str:
    """Return a text for the result of `hpcsgd.report.overlap.per_step`."""
    exposed, hidden = (found[f"{quantity}_seconds"] for quantity in ("exposed", "hidden"))
    both = Counter(exposed) + Counter(hidden)
    phases = (
        f"{name} {second_text(exposed.get(name, 0.0))} exposed, {second_text(hidden.get(name, 0.0))} hidden"
        for name, seconds in both.most_common()
        if seconds >= TOLD * both.total()
    )
    return f"{count_text(found['steps'], 'step')}; per step {'; '.join(phases)}"


def _ahead(numbers: Summary) -> str:
    ahead = numbers["mean_ahead"]
    return "" if ahead is None else f", {ahead:.2f} steps ahead of the slowest group"


def _shares(amounts: Mapping[str, float]) -> str:
    total = sum(amounts.values()) or 1
    return ", ".join(f"{phase} {amount / total:.0%}" for phase, amount in amounts.items())


def byte_text(size: float) -> str:
    """Return a number of bytes as text: ``12.3 MB``, in powers of 1000."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"))


def flop_text(number: float) -> str:
    """Return a number of floating-point operations as text: ``1.03 MFLOP``."""
    return _scaled(number, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {units[-1]}"


def second_text(seconds: float) -> str:
    """Return a duration as text: ``1.25 s``, ``3,600 s``."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
