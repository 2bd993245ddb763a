"""Pages have the figures of benchmarks/results.

Other tests check figures of the papers and those of docs/choosing.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from website.measured import (
    benchmarks,
    cluster,
    diloco,
    ensemble,
    gossip,
    gpu,
    late,
    muon,
    optimizers,
    performance,
    predictions,
    probe,
    readme,
    selsync,
    shard,
    sparse,
    torchrun,
)
from website.measured.results import ROOT

PAGES: dict[str, list[Callable[[], str]]] = {
    "README.md": [readme.quality, readme.speed, readme.accuracy, readme.loss],
    "benchmarks/README.md": [
        benchmarks.slow_groups,
        benchmarks.averages,
        benchmarks.random_runs,
        benchmarks.simulated_goodput,
        benchmarks.selection,
        benchmarks.deft_scaling,
        benchmarks.deft_planning,
        benchmarks.sparseloco,
        benchmarks.token_reading,
        benchmarks.staging,
        benchmarks.synchronizations,
        benchmarks.of_25_million,
        benchmarks.papers_scaling,
        benchmarks.messages,
        benchmarks.short_ramp,
        benchmarks.cost_of_probes,
        benchmarks.selsync_overhead,
        benchmarks.after_backward,
        benchmarks.simulated_failures,
        benchmarks.simulation_speed,
        benchmarks.in_groups_of_eight,
        benchmarks.muon,
        benchmarks.noise_in_one_group,
        cluster.predictions,
        ensemble.faults,
        ensemble.runs,
        gpu.selection,
        gpu.packing,
    ],
    "docs/choosing.md": [predictions.crossover],
    "docs/cluster.md": [cluster.scaling, cluster.opens, cluster.start],
    "docs/diloco.md": [diloco.quality, diloco.model],
    "docs/ensemble.md": [
        ensemble.slow_groups,
        ensemble.speed,
        ensemble.sending,
        ensemble.after_the_same_steps,
        ensemble.goodput,
        ensemble.at_scale,
    ],
    "docs/gossip.md": [gossip.speed, gossip.communicating, gossip.straggler, gossip.gain],
    "docs/gpu.md": [gpu.speed],
    "docs/late.md": [
        late.speed,
        late.computing,
        late.beyond_computing,
        late.beyond_computing_25_million,
        late.accuracy,
        late.plain,
        late.steps,
    ],
    "docs/muon.md": [muon.cost],
    "docs/natural_gradient.md": [optimizers.natural_gradient],
    "docs/performance.md": [performance.speed, performance.backends],
    "docs/plan.md": [predictions.plan],
    "docs/probe.md": [probe.answers, probe.at_the_papers_setting, probe.cost],
    "docs/selsync.md": [
        selsync.speed,
        selsync.communicating,
        selsync.lost,
        selsync.partitions,
        selsync.by_label,
    ],
    "docs/shard.md": [shard.speed],
    "docs/simulate.md": [predictions.simulation, predictions.simulated_failures],
    "docs/sparse.md": [sparse.exchange, sparse.density, sparse.by_label, sparse.selection],
    "docs/torchrun.md": [torchrun.endings],
}
NOT_MEASURED = {
    "| Python ≥ 3.11": "versions",
    "| `diloco(I)`, `async_diloco(I)` | 1/I |": "formulas",
    "| `--ranks 64..4096`": "options",
    "| `python benchmarks/sparse_exchange.py": "commands; the last one is a test, which prints its figures",
    "| `build` |": "goals",
    "| 6 M parameters, 4 emulated hosts": "tests/benchmarks/test_crossover.py",
    "| shared memory, 4 ranks |": "figures of other pages: test_choosing.py",
}
"""The beginnings of tables that are not checked here, with the reasons."""
CASES = [pytest.param(page, of, id=f"{page}-{of.__name__}") for page, each in PAGES.items() for of in each]


def tables(page: str) -> list[str]:
    """Return the tables without their first two lines, with one blank in each empty cell."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", page)]
    return [re.sub(" +", " ", part.split("\n", 2)[2]) for part in parts if part.startswith("| ")]


def says(page: str, what: str) -> bool:
    """Return whether a page has this table, or these words without further digits around them."""
    if what.startswith("|"):
        return re.sub(" +", " ", what) in tables(page)
    words = re.escape(" ".join(what.split())).replace(r"\ ", r"\s+")
    return re.search(rf"(?<![\d.,]){words}(?![.,]?\d)", page) is not None


@pytest.mark.parametrize(("page", "of"), CASES)
def test_the_page_says_what_was_measured(page: str, of: Callable[[], str]) -> None:
    assert says((ROOT / page).read_text(), of()), of()


@pytest.mark.parametrize(("page", "of"), CASES)
def test_another_number_is_found(page: str, of: Callable[[], str]) -> None:
    changed = (ROOT / page).read_text().translate(str.maketrans("0123456789", "1234567890"))
    assert not says(changed, of())


@pytest.mark.parametrize("page", PAGES)
def test_a_table_with_decimals_is_checked_or_has_a_reason(page: str) -> None:
    known = [re.sub(" +", " ", of()) for of in PAGES[page]]
    for found in tables((ROOT / page).read_text()):
        if re.search(r"\d\.\d", found) and found not in known:
            assert found.startswith(tuple(NOT_MEASURED)), found


def test_one_changed_cell_and_one_line_too_much_are_found() -> None:
    page = (ROOT / "docs/late.md").read_text()
    assert says(page, late.speed())
    assert not says(page.replace("| 0.509 |", "| 0.508 |"), late.speed())
    assert not says(page.replace("| `bsp` |", "| one more | 0.1 |\n| `bsp` |"), late.speed())
    assert not says("took 12 %", "took 1")
    assert not says("took 112 %", "12 %")
    assert not says("took 1.5 s", "took 1")
