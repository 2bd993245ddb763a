"""Simulated against real runs with late ranks and hosts that go down; needs root and iproute2.

    python benchmarks/simulation_error.py [--quick] [--json FILE]

Each method runs three times on four hosts of one rank, with links of 300 Mbit/s. In the first run no rank is
late. In the second, one rank always takes twice as long. In the third, one in five ranks, different ones in
each step, take three times as long. The simulation is given the time that a rank computes and which rank is
late in which step. It takes the duration of messages from the first run. It has to predict the speed of the
other two runs.

Four groups, which synchronize every 0.5 s, run once without failures, which shows how long a synchronization
takes. They run again with hosts that each go down every 20 s on average and come back 2.5 s later.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import Goal, Run, print_table
from harness.hosts import on_hosts, shaped_hosts
from hpcsgd.performance.simulation import simulate
from hpcsgd.performance.simulation.compute import Constant
from hpcsgd.performance.simulation.durations import Layout
from hpcsgd.performance.simulation.simulate import Simulation
from simulation_error import kills
from simulation_error.cases import CASES, RATE, AsInTheRun, P

HOSTS = 4
WORST = 0.1


def measured(methods: list[str], steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(HOSTS, f"{RATE:.0f}bit", "32kb") as name:
        out = Path(folder) / "rates.json"
        words = ["--out", str(out), "--steps", str(steps), "--methods", *methods]
        on_hosts(name, HOSTS, Path(__file__).with_suffix("") / "rank.py", words, 1800)
        return json.loads(out.read_text())


def simulated(method: str, late: str, computing: float, alone: float, steps: int) -> float:
    """Return the simulated steps per second; `alone` is the seconds of a real step without late ranks."""
    case = CASES[method]
    simulation = Simulation(
        layout=Layout(P, 1, 1),
        compute=Constant(computing),
        durations=case.durations(max(alone - computing, 0.0)),
        waits=case.method().waits,
        steps=steps,
        stragglers=AsInTheRun(late),
    )
    return simulate(simulation).steps_per_second


def with_kills(rounds: int, mtbf: float) -> dict[str, Any]:
    _, undisturbed, _ = kills.real(f"{RATE:.0f}bit", 10, 1e6)
    rate, _, downs = kills.real(f"{RATE:.0f}bit", rounds, mtbf)
    told = kills.simulated(rounds, mtbf, undisturbed - kills.EVERY * kills.SECONDS)
    late = f"{downs} hosts go down"
    return {
        "method": "ensemble", "late": late, "measured": rate, "simulated": told, "error": told / rate - 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated against real runs with late ranks and failures.")
    parser.add_argument("--quick", action="store_true", help="check within a minute that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    methods, steps = (["bsp", "sgp"], 8) if given.quick else (list(CASES), 60)
    run = Run()
    found = measured(methods, steps)
    rows: list[dict[str, Any]] = []
    for method, rates in found["rates"].items():
        for late, rate in rates.items():
            told = simulated(method, late, found["computing"], 1 / rates["nobody"], steps)
            rows.append(
                {
                    "method": method,
                    "late": late,
                    "measured": rate,
                    "simulated": told,
                    "error": told / rate - 1,
                }
            )
    rows.append(with_kills(*((20, 5.0) if given.quick else (400, 20.0))))
    head = ["method", "late", "measured steps/s", "simulated", "error"]
    cells = (
        [r["method"], r["late"], f"{r['measured']:.2f}", f"{r['simulated']:.2f}", f"{r['error']:+.1%}"]
        for r in rows
    )
    print_table(cells, head)
    print(f"computing alone takes {1e3 * found['computing']:.0f} ms per step")
    judged = [abs(row["error"]) for row in rows if row["late"] != "nobody"]
    run.conclude(rows, [Goal("worst error with ranks that are late or die", max(judged), WORST)], given.json)


if __name__ == "__main__":
    main()
