"""A run in numbers: what its metrics add up to, for ``summary.json`` and as the last lines printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from statistics import fmean, median
from typing import Any

from hpcsgd.report.figures import FIGURES, found_in, speed_text, written
from hpcsgd.report.metrics import Record

Summary = dict[str, Any]


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one kind, in order."""
    return [record for record in records if record["kind"] == kind]


def noted(records: Iterable[Record], *names: str) -> list[Record]:
    """The notes of those steps in which all of these were noted."""
    return [record for record in of_kind(records, "notes") if all(name in record for name in names)]


def phase_totals(records: Iterable[Record], quantity: str) -> dict[str, float]:
    """``seconds`` or ``bytes`` of the whole run by phase, largest first."""
    totals: Counter[str] = Counter()
    for record in of_kind(records, "step"):
        totals.update(record[f"phase_{quantity}"])
    return dict(totals.most_common())


def count_totals(records: Iterable[Record]) -> dict[str, dict[int, int]]:
    """By what the method counted, how often which number came in the whole run, over all ranks."""
    totals: dict[str, Counter[int]] = {}
    for record in of_kind(records, "step"):
        for name, counts in record.get("counts", {}).items():
            totals.setdefault(name, Counter()).update({int(value): n for value, n in counts.items()})
    return {name: dict(sorted(counts.items())) for name, counts in totals.items()}


def link_totals(records: Iterable[Record]) -> dict[int, float]:
    """Bytes of messages from rank 0 to each group in the whole run."""
    totals: Counter[int] = Counter()
    for record in of_kind(records, "step"):
        for group, size in record.get("link_bytes", {}).items():
            totals[int(group)] += size
    return dict(sorted(totals.items()))


def summary(records: Sequence[Record]) -> Summary:
    """The run in numbers. Seconds are those of training steps; what was never measured is None."""
    steps, evaluations = of_kind(records, "step"), of_kind(records, "evaluation")
    samples = sum(record["samples"] for record in steps)
    seconds = sum(record["samples"] / record["samples_per_s"] for record in steps if record["samples_per_s"])
    last, tested = _last(steps), _last(evaluations)
    merits, best_epoch = _merits(evaluations)
    counts = count_totals(records)
    distances = [record["distance"] for record in of_kind(records, "meeting")]
    last_step = max((record["step"] for record in records), default=0)
    return {
        "steps": last_step,
        "epochs": max((record["epoch"] for record in steps), default=0),
        "samples": samples,
        "seconds": seconds,
        "samples_per_s": samples / seconds if seconds else None,
        **_work(steps, seconds),
        "training_loss": last.get("loss"),
        "loss": tested.get("loss"),
        "best_loss": min((record["loss"] for record in evaluations), default=None),
        **merits,
        "best_epoch": best_epoch,
        "meetings": len(distances),
        "lssr": lssr(records, last_step),
        "median_distance": median(distances) if distances else None,
        "mean_density": _mean_of(records, "density"),
        "mean_select_seconds": _mean_of(records, "select_seconds"),
        "distance": tested.get("distance"),
        "mean_staleness": _mean(counts.get("staleness", {})),
        "mean_ahead": _mean(counts.get("ahead", {})),
        "seconds_per_phase": phase_totals(records, "seconds"),
        "bytes_per_phase": phase_totals(records, "bytes"),
        **_by_torch(steps),
        "bytes_per_link": {str(group): size for group, size in link_totals(records).items()},
    }


def _work(steps: Sequence[Record], seconds: float) -> Summary:
    """Tokens and the model's FLOPs, where they were counted, and the last norm of the gradient."""
    norms = [record["gradient_norm"] for record in steps if "gradient_norm" in record]
    found: Summary = {"gradient_norm": norms[-1]} if norms else {}
    for quantity in ("tokens", "flops"):
        amounts = [record[quantity] for record in steps if quantity in record]
        if amounts and seconds:
            found |= {quantity: sum(amounts), f"{quantity}_per_s": sum(amounts) / seconds}
    # The peak is that of the ranks that there were.
    used = [r["utilization"] * r["samples"] / r["samples_per_s"] for r in steps if "utilization" in r]
    return {**found, "utilization": sum(used) / seconds} if used and seconds else found


def _by_torch(steps: Sequence[Record]) -> Summary:
    """Bytes by formula, where torch sends some; told apart from those that were counted."""
    sent = [record["bytes_by_torch"] for record in steps if "bytes_by_torch" in record]
    return {"bytes_by_torch": sum(sent)} if sent else {}


def _merits(evaluations: Sequence[Record]) -> tuple[Summary, int | None]:
    """The last and the best value of each figure of merit, and after which epoch the first one was best."""
    if not evaluations:
        return {"accuracy": None, "best_accuracy": None}, None
    merits: Summary = {}
    first, *_ = keys = found_in(evaluations)
    for key in keys:
        values = [record[key] for record in evaluations]
        merits |= {key: values[-1], f"best_{key}": FIGURES[key].best(values)}
    best = FIGURES[first].best(evaluations, key=lambda record: record[first])
    return merits, best["epoch"]


def lssr(records: Iterable[Record], steps: int) -> float | None:
    """The part of all steps that groups made alone (LSSR, eq. 4 of the SelSync paper): they neither met nor
    exchanged anything else. None where it was not recorded that they ever did."""
    records = list(records)
    met = {record["step"] for record in of_kind(records, "meeting")}
    together = len(met) + sum(record.get("shared", 0) for record in of_kind(records, "step"))
    return 1 - together / steps if together or noted(records, "met") else None


def _mean_of(records: Iterable[Record], key: str) -> float | None:
    """Of what was noted of steps."""
    values = [record[key] for record in noted(records, key)]
    return fmean(values) if values else None


def _mean(counts: Mapping[int, int]) -> float | None:
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else None


def _last(records: Sequence[Record]) -> Record:
    return records[-1] if records else {}


def summary_text(numbers: Summary) -> str:
    """The lines a user reads at the end of a run, from what `summary` returned."""
    lines = [
        f"trained   {numbers['steps']:,} steps, {numbers['epochs']} epochs, {numbers['samples']:,} samples"
        f" in {timedelta(seconds=round(numbers['seconds']))}"
    ]
    if numbers["samples_per_s"] is not None:
        lines.append(f"speed     {speed_text(numbers)}{_model_work(numbers)}")
    if numbers["training_loss"] is not None:
        lines.append(f"loss      {numbers['training_loss']:.4g} in training")
    if numbers["loss"] is not None:
        lines.append(f"test      {_tested(numbers)}, loss {numbers['loss']:.4g}")
    if numbers["median_distance"] is not None:
        met = f"{numbers['meetings']:,} times, median distance {numbers['median_distance']:.3g}"
        lines.append(f"groups    met {met}; {numbers['lssr']:.1%} of the steps alone")
    elif numbers["lssr"]:
        lines.append(f"groups    shared gradients, but for {numbers['lssr']:.1%} of the steps")
    elif numbers["distance"]:
        lines.append(f"groups    at distance {numbers['distance']:.3g} from their mean at the last test")
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
        lines.append(f"by torch  {size} in groups, for the sharded model, by formula")
    if links := numbers["bytes_per_link"]:
        lines.append(
            f"links     from rank 0 to {len(links)} groups, {byte_text(max(links.values()))} at most"
        )
    return "\n".join(lines)


def _model_work(numbers: Summary) -> str:
    """Of a token, or else of a sample."""
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


TOLD = 0.02
"""The least part of all that a phase has to take to be worth a word."""


def _traced(found: Summary) -> str:
    """What `hpcsgd.report.overlap.per_step` found."""
    exposed, hidden = (found[f"{quantity}_seconds"] for quantity in ("exposed", "hidden"))
    both = Counter(exposed) + Counter(hidden)
    told = (
        f"{name} {second_text(exposed.get(name, 0.0))} exposed, {second_text(hidden.get(name, 0.0))} hidden"
        for name, seconds in both.most_common()
        if seconds >= TOLD * both.total()
    )
    return f"{found['steps']} steps, of one {'; '.join(told)}"


def _ahead(numbers: Summary) -> str:
    ahead = numbers["mean_ahead"]
    return "" if ahead is None else f", {ahead:.2f} steps ahead of the slowest group"


def _shares(amounts: Mapping[str, float]) -> str:
    total = sum(amounts.values()) or 1
    return ", ".join(f"{phase} {amount / total:.0%}" for phase, amount in amounts.items())


def byte_text(size: float) -> str:
    """A number of bytes to read: ``12.3 MB``; powers of 1000."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB"))


def flop_text(number: float) -> str:
    """As many floating-point operations to read: ``1.03 MFLOP``."""
    return _scaled(number, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def _scaled(number: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {units[-1]}"


def second_text(seconds: float) -> str:
    """A duration to read: ``1.25 s``, ``3,600 s``."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
