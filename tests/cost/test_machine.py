from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from hpcsgd.cost.collectives import SHAPES, seconds
from hpcsgd.cost.compute import Busy, Compute
from hpcsgd.cost.link_classes import LinkClass
from hpcsgd.cost.links import Link, Points
from hpcsgd.cost.machine import STAND_IN, About, Machine, dump, load, versions
from hpcsgd.errors import UserError

BY_HAND = """\
format = 1
[machine]
hosts = 16
ranks_per_host = 4
[[link]]
operation = "any"
kind = "inside"
alpha_seconds = [5e-7]
beta_seconds_per_byte = [1e-10]
[[link]]
operation = "any"
kind = "across"
alpha_seconds = [2e-6]
beta_seconds_per_byte = [8e-11]
relative_error = 0.3
"""
INSIDE, ACROSS, MIXED = LinkClass(4), LinkClass(16, 16), LinkClass(64, 16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's working directory, relative to which messages have short names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str) -> Machine:
    path = Path("machine.toml")
    path.write_text(text)
    return load(path)


def link(operation: str = "allreduce", kind: Any = "across", **more: Any) -> Link:
    given: dict[str, Any] = {"alpha_seconds": (2e-6,), "beta_seconds_per_byte": (8e-11,), **more}
    return Link(operation=operation, kind=kind, **given)


def machine(*links: Link, **more: Any) -> Machine:
    return Machine(machine=About(hosts=16, ranks_per_host=4), link=links, **more)


FULL = machine(
    link(
        from_bytes=(0, 65536),
        ranks=(2, 4),
        alpha_seconds=(2e-6, 9e-6),
        beta_seconds_per_byte=(1e-10, 8e-11),
        alpha_standard_error_seconds=(1e-7, 0.0),
        beta_standard_error_seconds_per_byte=(1e-12, 1e-12),
        relative_error=0.11,
    ),
    link("alltoall", "inside"),
    points=(
        Points(operation="allreduce", ranks=4, hosts=4, at_once=1, bytes=(8, 2**26), seconds=(1e-5, 0.01)),
    ),
    compute=Compute(
        numel=11_173_962,
        batch_sizes=(8, 16),
        forward_seconds_by_batch=(0.11, 0.21),
        backward_seconds_by_batch=(0.2, 0.4),
        update_seconds_per_element=2e-9,
        selection_seconds_per_element={"topk": 3e-9},
        busy=Busy(forward=1.5, update=1.1),
    ),
)


def test_a_machine_is_read_back_as_it_was_written(folder: Path) -> None:
    assert loaded(dump(FULL)) == FULL


def test_lists_are_written_in_a_line() -> None:
    assert "from_bytes = [0, 65536]\n" in dump(FULL)
    assert "seconds = [1e-05, 0.01]\n" in dump(FULL)


def test_by_hand_two_numbers_a_link_do(folder: Path) -> None:
    model = loaded(BY_HAND)
    assert (model.hosts, model.ranks_per_host, model.compute) == (16, 4, None)
    for operation in SHAPES:
        told = model.seconds(operation, 1e6, ACROSS)
        assert told == pytest.approx(float(seconds(operation, 1e6, 16, 2e-6, 8e-11))), operation
    assert model.relative_error("allreduce", ACROSS) == 0.3
    assert model.relative_error("allreduce", INSIDE) == 0.5


def test_the_examples_are_machines() -> None:
    files = sorted((Path(__file__).parents[2] / "examples" / "machines").glob("*.toml"))
    assert files
    for file in files:
        model = load(file)
        over_all = LinkClass(model.hosts * model.ranks_per_host, model.hosts)
        assert 0 < model.seconds("allreduce", 1e8, over_all) < 1
        assert model.compute is not None
        assert model.compute.forward_seconds(16) < model.compute.backward_seconds(16)


def test_the_example_of_the_page_is_a_machine(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "machine.md").read_text()
    (by_hand,) = (block.partition("```")[0] for block in page.split("```toml\n")[1:])
    head = BY_HAND.partition("[[link]]")[0]
    assert loaded(head + by_hand).relative_error("bcast", LinkClass(16, 16)) == 0.5
    with pytest.raises(UserError) as told:
        loaded(BY_HAND.replace("[2e-6]", "[1.5]"))
    assert str(told.value) == (
        "machine.toml: [link 2]: alpha_seconds = 1.5: 1.5 s for a message; in microseconds? write 1.5e-06"
    )


def test_alone_or_with_nothing_to_say_takes_no_time() -> None:
    model = machine(link())
    assert model.seconds("alltoall", 1e9, LinkClass(1)) == 0.0 == model.seconds("allreduce", 0, ACROSS)
    assert model.relative_error("alltoall", LinkClass(1)) == 0.0


def test_every_segment_holds_from_its_bytes_on() -> None:
    model = machine(link(from_bytes=(0, 1000), alpha_seconds=(1e-6, 1e-5), beta_seconds_per_byte=(0.0, 0.0)),
                    points=FULL.points)  # fmt: skip
    told = [model.seconds("allreduce", n, LinkClass(4, 4)) for n in (1, 999, 1000, 10**9)]
    assert told == pytest.approx([4e-6, 4e-6, 4e-5, 4e-5])


@pytest.mark.parametrize(
    ("there", "asked", "way", "taken", "stands_in"),
    [
        (["alltoall across", "any across"], "alltoall", ACROSS, "alltoall across", False),
        (["any across", "alltoall mixed"], "alltoall", ACROSS, "any across", False),
        (["alltoall mixed", "allreduce across"], "alltoall", ACROSS, "alltoall mixed", True),
        (["alltoall across", "allreduce mixed"], "alltoall", MIXED, "alltoall across", True),
        (["any across", "allreduce mixed"], "alltoall", MIXED, "any across", True),
        (["sendrecv across", "allreduce across"], "alltoall", ACROSS, "allreduce across", True),
        (["sendrecv across", "bcast across"], "alltoall", ACROSS, "sendrecv across", True),
        (["sendrecv inside", "alltoall across"], "alltoall", INSIDE, "sendrecv inside", True),
    ],
)
def test_what_stands_in_for_what(
    there: list[str], asked: str, way: LinkClass, taken: str, stands_in: bool
) -> None:
    links = [
        link(*name.split(), alpha_seconds=(1e-6 * (1 + i),), relative_error=0.1)
        for i, name in enumerate(there)
    ]
    model = machine(*links)
    chosen = links[there.index(taken)]
    assert model.seconds(asked, 4096, way) == chosen.seconds(asked, 4096, way)
    assert model.relative_error(asked, way) == pytest.approx(0.1 + (STAND_IN if stands_in else 0))


@pytest.mark.parametrize(("there", "way"), [("inside", ACROSS), ("inside", MIXED), ("across", INSIDE)])
def test_nothing_stands_in_for_the_network_or_for_memory(there: str, way: LinkClass) -> None:
    with pytest.raises(
        UserError, match=rf"the machine file has nothing that goes .*; it has: allreduce {there}"
    ):
        machine(link(kind=there)).seconds("allreduce", 1e6, way)


def test_an_operation_that_is_none() -> None:
    with pytest.raises(UserError, match="operation = 'alreduce': did you mean 'allreduce'"):
        machine(link()).seconds("alreduce", 1e6, ACROSS)


def test_a_file_of_other_software_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = versions()
    assert {"hpcsgd", "torch"} <= set(now)
    with caplog.at_level(logging.WARNING):
        about = About(hosts=16, ranks_per_host=4, versions=now)
        loaded(dump(dataclasses.replace(FULL, machine=about)))
        assert caplog.messages == []
        about = dataclasses.replace(about, versions={**now, "torch": "1.0", "lost": "2"})
        loaded(dump(dataclasses.replace(FULL, machine=about)))
    assert caplog.messages == [
        f"machine.toml: measured with torch 1.0, this is {now['torch']}",
        "machine.toml: measured with lost 2, this is without it",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1\n", "", "machine.toml: format = None: this hpcsgd reads machine files of format 1"),
        ("format = 1", "format = 2", "machine.toml: format = 2: this hpcsgd reads machine files of format 1"),
        ("hosts = 16\n", "", r"machine.toml: \[machine\] hosts is missing: expected int ≥ 1"),
        ("hosts = 16", "hosts = 0", r"machine.toml: \[machine\] hosts = 0: expected int ≥ 1"),
        ("[[link]]", "[link]", r"Cannot overwrite|not valid TOML"),
        ("[[link]]", "[[links]]", r"machine.toml: links = .*: unknown key: did you mean 'link'"),
        (
            "beta_seconds_per_byte = [8e-11]\n",
            "",
            r"machine.toml: \[link 2\] beta_seconds_per_byte is missing: expected a list of numbers ≥ 0",
        ),
        (
            "beta_seconds_per_byte = [8e-11]",
            "beta_seconds_per_byte = 8e-11",
            r"machine.toml: \[link 2\] beta_seconds_per_byte = 8e-11: expected a list of numbers ≥ 0",
        ),
        ("[8e-11]", "[-8e-11]", r"\[link 2\] beta_seconds_per_byte = \[-8e-11\]: expected a list of numbers"),
        ("[8e-11]", "[]", r"machine.toml: \[link 2\]: beta_seconds_per_byte = \[\]: at least one segment"),
        ("[8e-11]", "[8e-11, 9e-11]", r"\[link 2\]: beta_seconds_per_byte has 2 segments, from_bytes 1"),
        ("[2e-6]", "[1.5]", r"\[link 2\]: alpha_seconds = 1.5: 1.5 s for a message; in .*write 1.5e-06"),
        ("[2e-6]", "[2000]", r"alpha_seconds = 2000: 2000 s for a message; in nanoseconds\? write 2e-06"),
        ("[2e-6]", "[0.002]", r"alpha_seconds = 0.002: 0.002 s for a message; in milliseconds\? write 2e-06"),
        ("[2e-6]", "[2e-9]", "alpha_seconds = 2e-09: 2 ns for a message; 50 ns to 1 ms are allowed"),
        ("[2e-6]", "[2e9]", "2e.09 s for a message; at least 5e-08 and below 0.001 are allowed"),
        ("[8e-11]", "[12.5]", r"beta_seconds_per_byte = 12.5: 12.5 s for a byte; in GB/s\? write 8e-11"),
        ("[8e-11]", "[12.5e9]", r"in bytes a second\? write 8e-11"),
        ("[8e-11]", "[0.08]", r"in nanoseconds a byte\? write 8e-11"),
        ("[8e-11]", "[8e-14]", r"beta_seconds_per_byte = 8e-14: 12.5 TB/s; 1 MB/s to 10 TB/s are allowed"),
        ("[8e-11]", "[0.0]", "beta_seconds_per_byte = 0: no time for a byte"),
        ('kind = "across"', 'kind = "acros"', r"\[link 2\] kind = .*: did you mean 'across'"),
        ('kind = "across"', 'kind = "inside"', r"two \[\[link\]\] of any, inside, .*: one is allowed"),
        (
            'operation = "any"\nkind = "across"',
            'operation = "alltoal"\nkind = "across"',
            r"machine.toml: \[link 2\]: operation = 'alltoal': did you mean 'alltoall'",
        ),
        ("relative_error = 0.3", "from_bytes = [8]", r"from_bytes = \[8\]: segments begin with 0"),
        ("relative_error = 0.3", "from_bytes = [0, 0]\n", "has 1 segments, from_bytes 2"),
        ("relative_error = 0.3", "relativ_error = 0.3", "unknown key: did you mean 'relative_error'"),
        ("relative_error = 0.3", "[compute]\nbatch_sizes = [4]", "each once, with its forward"),
        (
            "relative_error = 0.3",
            "[compute.selection_seconds_per_element]\ntopk = 0",
            r"\[compute.*selection_seconds_per_element.*: expected a table of numbers > 0",
        ),
        ("relative_error = 0.3", "[compute.busy]\nforward = -1", r"\[compute.busy\] forward = -1: expected"),
        (
            "relative_error = 0.3",
            '[[points]]\noperation = "bcast"\nranks = 4\nhosts = 1\nat_once = 1\nbytes = [8]\nseconds = []',
            r"\[points 1\]: 1 bytes and 0 seconds",
        ),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused_in_a_line(
    folder: Path, old: str, new: str, message: str
) -> None:
    head, found, tail = BY_HAND.rpartition(old)
    assert found
    with pytest.raises(UserError, match=message) as told:
        loaded(head + new + tail)
    assert str(told.value).startswith("machine.toml: ")
    assert "\n" not in str(told.value)


def test_a_file_without_links_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^machine.toml: no \[\[link\]\]"):
        loaded("format = 1\n[machine]\nhosts = 1\nranks_per_host = 1\n")


def test_segments_that_do_not_ascend_are_refused() -> None:
    two: dict[str, Any] = {"alpha_seconds": (1e-6, 1e-6), "beta_seconds_per_byte": (1e-10, 1e-10)}
    with pytest.raises(UserError, match=r"from_bytes = \[0, 0\]: segments begin with 0 and ascend"):
        link(from_bytes=(0, 0), **two)


def test_what_was_measured_is_believed() -> None:
    """Links with measured points may exceed the plausible times, because a busy machine can be slow."""
    slow = link(alpha_seconds=(5e-3,))
    assert machine(slow, points=FULL.points).seconds("allreduce", 8, LinkClass(4, 4)) > 4 * 5e-3
    with pytest.raises(UserError, match="alpha_seconds"):
        machine(slow)


class TestCompute:
    """The requirements on measured compute times."""

    def test_batches_lie_on_a_line(self) -> None:
        compute = Compute(
            batch_sizes=(8, 32), forward_seconds_by_batch=(0.09, 0.33), backward_seconds_by_batch=(0.1, 0.4)
        )
        assert compute.forward_seconds(16) == pytest.approx(0.17)
        assert compute.forward_seconds(64) == pytest.approx(0.65)
        assert compute.backward_seconds(8) == pytest.approx(0.1)

    def test_one_batch_is_in_proportion(self) -> None:
        compute = Compute(
            batch_sizes=(8,), forward_seconds_by_batch=(0.08,), backward_seconds_by_batch=(0.2,)
        )
        assert compute.forward_seconds(16) == pytest.approx(0.16)

    def test_elements(self) -> None:
        assert FULL.compute is not None
        assert FULL.compute.update_seconds(1e6) == pytest.approx(2e-3)
        assert FULL.compute.selection_seconds("topk", 1e6) == pytest.approx(3e-3)

    def test_what_was_not_measured_is_reported(self) -> None:
        with pytest.raises(UserError, match="no model was measured"):
            Compute().forward_seconds(8)
        with pytest.raises(UserError, match="update_seconds_per_element: was not measured"):
            Compute().update_seconds(8)
        with pytest.raises(UserError, match=r"deft: was not measured: .*topk"):
            Compute(selection_seconds_per_element={"topk": 1e-9}).selection_seconds("deft", 8)
