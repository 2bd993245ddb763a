"""The totals of a run's records. Records are added one after the other, to need little memory."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median
from typing import Any

from hpcsgd.report.figures import FIGURES
from hpcsgd.report.metrics import Record


class Totals:
    """The totals of all records added so far. All distances are kept, to compute their median."""

    def __init__(self) -> None:
        self.steps = self.samples = 0
        self.epochs = 0.0
        """Epochs that are done, with the fraction of the last one."""
        self.seconds = 0.0
        """Seconds of training steps."""
        self.bytes = 0.0
        """Bytes sent by rank 0."""
        self.by_torch: float | None = None
        """Bytes, by formula, that torch has sent in addition for an FSDP model; None for other models."""
        self.together = 0
        """Steps in which groups averaged models or exchanged anything else."""
        self.distances = array("d")
        self.phases: dict[str, Counter[str]] = {"seconds": Counter(), "bytes": Counter()}
        self.counts: dict[str, Counter[int]] = {}
        """For each metric that the method counts: how often each value occurred, over all ranks."""
        self.links: Counter[int] = Counter()
        self.amounts: Counter[str] = Counter()
        """The numbers of tokens and FLOPs."""
        self.evaluated = Evaluated()
        self._used: float | None = None  # seconds that the model's FLOPs take at the peak
        self._last: Record = {}  # the last "step" record
        self._norm: float | None = None
        self._synced_at: int | None = None
        self._means: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        self._chosen = False

    @staticmethod
    def of(records: Iterable[Record]) -> Totals:
        totals = Totals()
        for record in records:
            totals.add(record)
        return totals

    def add(self, record: Record) -> None:
        self.steps = max(self.steps, record["step"])
        match record["kind"]:
            case "step":
                self._read(record)
            case "sync":
                self.distances.append(record["distance"])
                self.together += record["step"] != self._synced_at
                self._synced_at = record["step"]
            case "method":
                self._chosen = self._chosen or "synced" in record
                for name in ("density", "select_seconds"):
                    if name in record:
                        mean = self._means[name]
                        mean[0] += 1
                        mean[1] += record[name]
            case "eval":
                self.evaluated.add(record)

    def _read(self, record: Record) -> None:
        samples, speed = record["samples"], record["samples_per_s"]
        seconds = samples / speed if speed else 0.0
        self.epochs = max(self.epochs, record.get("progress", record["epoch"]))
        self.samples += samples
        self.seconds += seconds
        self.together += record.get("grads_shared", 0)
        for quantity, totals in self.phases.items():
            for phase, amount in record[f"phase_{quantity}"].items():
                totals[phase] += amount
        self.bytes += sum(record["phase_bytes"].values())
        if "bytes_by_torch" in record:
            self.by_torch = (self.by_torch or 0.0) + record["bytes_by_torch"]
        for name, counts in record.get("counts", {}).items():
            self.counts.setdefault(name, Counter()).update({int(value): n for value, n in counts.items()})
        for group, size in record.get("link_bytes", {}).items():
            self.links[int(group)] += size
        for quantity in ("tokens", "flops"):
            if quantity in record:
                self.amounts[quantity] += record[quantity]
        if "utilization" in record:
            # The peak is that of the ranks that made these steps.
            self._used = (self._used or 0.0) + record["utilization"] * seconds
        self._norm = record.get("gradient_norm", self._norm)
        self._last = record

    @property
    def lssr(self) -> float | None:
        """The fraction of steps in which groups exchanged nothing (LSSR, eq. 4 of the SelSync paper).

        None if no record shows that groups ever exchanged anything.
        """
        return 1 - self.together / self.steps if self.steps and (self.together or self._chosen) else None

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that `hpcsgd.report.summary.summary` returns."""
        return {
            "steps": self.steps,
            "epochs": _whole_or_rounded(self.epochs),
            "samples": self.samples,
            "seconds": self.seconds,
            "samples_per_s": self.samples / self.seconds if self.seconds else None,
            **self._work(),
            "training_loss": self._last.get("loss"),
            **self.evaluated.numbers(),
            "model_averages": len(self.distances),
            "lssr": self.lssr,
            "median_distance": median(self.distances) if self.distances else None,
            "mean_density": self._mean("density"),
            "mean_select_seconds": self._mean("select_seconds"),
            "mean_staleness": mean_of(self.counts.get("staleness", {})),
            "mean_ahead": mean_of(self.counts.get("ahead", {})),
            "seconds_per_phase": dict(self.phases["seconds"].most_common()),
            "bytes_per_phase": dict(self.phases["bytes"].most_common()),
            "bytes_per_link": {str(group): size for group, size in sorted(self.links.items())},
            **({} if self.by_torch is None else {"bytes_by_torch": self.by_torch}),
        }

    def _work(self) -> dict[str, Any]:
        """Return tokens and FLOPs, their rates, and the last gradient norm, as far as they were recorded."""
        found: dict[str, Any] = {} if self._norm is None else {"gradient_norm": self._norm}
        if not self.seconds:
            return found
        for quantity, amount in self.amounts.items():
            found |= {quantity: amount, f"{quantity}_per_s": amount / self.seconds}
        return found if self._used is None else {**found, "utilization": self._used / self.seconds}

    def _mean(self, name: str) -> float | None:
        times, total = self._means[name]
        return total / times if times else None


class Evaluated:
    """The last and the best result of the evaluations, for each figure of merit that all of them have."""

    def __init__(self) -> None:
        self._last: Record = {}
        self._best_loss: float | None = None
        self._best: dict[str, Record] | None = None

    def add(self, record: Record) -> None:
        keys = FIGURES if self._best is None else self._best
        best = {key: record for key in keys if key in record}
        for key, before in (self._best or {}).items():
            if key in best and FIGURES[key].best(before[key], record[key]) == before[key]:
                best[key] = before
        loss = record["loss"]
        self._best, self._last = best, record
        self._best_loss = loss if self._best_loss is None else min(self._best_loss, loss)

    def numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "loss": self._last.get("loss"),
            "best_loss": self._best_loss,
            "distance": self._last.get("distance"),
            "best_epoch": None,
        }
        if self._best is None:
            return found | {"accuracy": None, "best_accuracy": None}
        for i, (key, best) in enumerate(self._best.items()):
            found |= {key: self._last[key], f"best_{key}": best[key]}
            if i == 0:
                found["best_epoch"] = best["epoch"]
        return found


def _whole_or_rounded(number: float) -> float:
    return int(number) if number % 1 == 0 else round(number, 4)


def mean_of(counts: dict[int, int] | Counter[int]) -> float | None:
    """Return the mean of the keys of `counts`, each weighted with its count; None without counts."""
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else None
