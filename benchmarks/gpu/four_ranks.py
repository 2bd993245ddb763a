"""2 x 2 ranks of MPI on one GPU, with tensors sent through the host, against the same training on the CPU."""

from __future__ import annotations

from typing import Any

from gpu.pytests import Tested, tested
from gpu.section import FAR, Found, Setting

METHODS, RUNS, ENDS = (
    "tests/methods/test_battery.py",
    "tests/train/test_on_any_device.py",
    "tests/comm/test_ending_on_devices.py",
)
RANKS = 4
FEW = {
    METHODS: "2-2 and (hierarchical or int or sgp) and not few",
    RUNS: "bf16_master or DEFT",
    ENDS: "killed",
}
"""The tests of each file that are run with --rehearse or --quick."""
FULL = {METHODS: "explicit and (2-2 or one_group)"}
ALL_MARKS = ["-m", "not soak and not large"]
"""Other tests are left to `make test-long`, because they take long on the test device."""


def measure(setting: Setting, found: Found) -> None:
    for about, file, ranks, share in (
        ("every method on 4 ranks, as on the CPU", METHODS, RANKS, 0.45),
        ("runs of every kind on 4 ranks, as on the CPU", RUNS, RANKS, 0.4),
        ("a rank that dies ends all within 10 s", ENDS, 1, 0.15),
    ):
        row = chosen(file, ranks, share, setting)
        row.print()
        found.add("tests", [row.row()], row.goals(about))


def chosen(file: str, ranks: int, share: float, setting: Setting) -> Tested:
    words: list[Any] = [file, "--on-devices", setting.kind if setting.on_gpu else FAR, *ALL_MARKS]
    if some := (FEW if setting.rehearse or setting.quick else FULL).get(file):
        words += ["-k", some]
    return tested(words, setting.seconds * share, ranks)
