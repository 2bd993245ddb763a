"""The report page in a real browser: no errors, all plots drawn, and no requests to other hosts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpcsgd.report.page import write
from report.page import browser
from report.page.browser import Tab
from report.page.folders import lines, records, run

pytest.importorskip("plotly", reason="the extra [report] is not installed")
PROGRAM = browser.found()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"none of {', '.join(browser.NAMES)} is here")

PLOTS = "document.querySelectorAll('.plot .main-svg').length"
LABELS = "[...document.querySelectorAll('.plot .xtitle')].map((title) => title.textContent)"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert PROGRAM is not None
    with browser.tab(PROGRAM, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def assert_sound(tab: Tab, page: Path) -> None:
    assert tab.errors == []
    own = ("data:", "blob:", page.resolve().as_uri())
    assert [url for url in tab.requests if not url.startswith(own)] == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_plots_of_one_run(tab: Tab, tmp_path: Path, dark: bool) -> None:
    page = write([run(tmp_path / "one")])
    tab.open(page, dark=dark)
    panels = tab.evaluate("data.panels.length")
    assert panels > 10
    drawn = "[...document.querySelectorAll('.plot')].filter((plot) => plot.querySelector('.main-svg')).length"
    assert tab.evaluate(drawn) == panels
    shown = tab.evaluate("document.getElementById('panel-0').data[0].y")
    assert shown == pytest.approx([r["loss"] for r in records() if r["kind"] == "step"], rel=1e-5)
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, colour[4:-1].split(","))) < 3 * 60 if dark else colour == "rgb(255, 255, 255)"
    assert_sound(tab, page)


@pytest.mark.slow
def test_a_choice_of_what_courses_are_drawn_against(tab: Tab, tmp_path: Path) -> None:
    page = write([run(tmp_path / "one")])
    tab.open(page)
    readings = [r for r in records() if r["kind"] == "step"]
    spent = {
        "samples": np.cumsum([r["samples"] for r in readings]),
        "seconds": np.cumsum([r["samples"] / r["samples_per_s"] for r in readings]),
        "bytes": np.cumsum([sum(r["phase_bytes"].values()) for r in readings]),
    }
    for name, expected in spent.items():
        tab.evaluate(f"document.querySelector('[value={name}]').click()")
        assert tab.evaluate("document.getElementById('panel-0').data[0].x") == pytest.approx(
            expected.tolist(), rel=1e-4
        )
        # The evaluation at step 20 must be drawn where the step record of step 20 is.
        (there,) = tab.evaluate("document.getElementById('panel-1').data[0].x.slice(0, 1)")
        assert there == pytest.approx(expected[[r["step"] for r in readings].index(20)], rel=1e-4)
    assert "bytes sent by rank 0" in tab.evaluate(LABELS)
    assert_sound(tab, page)


@pytest.mark.slow
def test_runs_can_be_left_out(tab: Tab, tmp_path: Path) -> None:
    for name in ("a", "b<i>"):
        run(tmp_path / "sweep" / name, records(seed=len(name)))
    page = write([tmp_path / "sweep"])
    tab.open(page)
    names = tab.evaluate("[...document.querySelectorAll('#runs label')].map((label) => label.textContent)")
    assert names == ["a", "b<i>"]
    tab.evaluate("document.querySelectorAll('#runs input')[1].click()")
    assert tab.evaluate("document.getElementById('panel-0').data.map((trace) => trace.visible)") == [
        True,
        False,
    ]
    assert_sound(tab, page)


@pytest.mark.slow
def test_names_are_no_scripts(tab: Tab, tmp_path: Path) -> None:
    evil = "<img src=x onerror=document.title='gotcha'>"
    found = [*records(), {"kind": "method", "step": 60, evil: 1.0, f"{evil}_seconds": 1.0, "b_seconds": 2.0}]
    page = write([run(tmp_path / "<img src=x onerror=alert(1)>", found, note=evil)])
    tab.open(page)
    assert tab.evaluate("document.title") == "<img src=x onerror=alert(1)>"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert_sound(tab, page)


@pytest.mark.slow
def test_on_paper_plots_fit_their_frames(tab: Tab, tmp_path: Path) -> None:
    page = write([run(tmp_path / "one")])
    tab.open(page, dark=True)
    tab.paper(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    colour = "document.getElementById('panel-0').layout.font.color"
    assert tab.evaluate(colour) == "#e3e7ec"
    tab.evaluate("print(true)")
    assert tab.evaluate(colour) == "#1b1f24", "dark on white paper"
    tab.ask("Emulation.setEmulatedMedia", media="print")
    tab.ask("Emulation.setDeviceMetricsOverride", width=703, height=1000, deviceScaleFactor=1, mobile=False)
    edge = "getBoundingClientRect().right"
    beyond = f"(figure) => figure.querySelector('.main-svg').{edge} > figure.{edge}"
    assert tab.evaluate(f"[...document.querySelectorAll('figure')].filter({beyond}).length") == 0
    tab.ask("Emulation.setEmulatedMedia", media="")
    assert_sound(tab, page)


@pytest.mark.slow
def test_a_live_page_reloads_itself(tab: Tab, tmp_path: Path) -> None:
    from hpcsgd.report.page import runs, writing

    page = tmp_path / "report.html"
    folder = run(tmp_path / "one", records(30))
    writing._write(page, [runs.load("one", folder)], every=10)
    tab.open(page)
    assert tab.evaluate("document.querySelectorAll('dd')[2].textContent") == "30"
    (folder / "metrics.jsonl").write_text(lines(records(60)))
    writing._write(page, [runs.load("one", folder)], every=10)
    tab.until(f"document.querySelectorAll('dd')[2]?.textContent === '60' && {browser.DRAWN}")
    tab.evaluate("document.getElementById('follow').click()")
    assert_sound(tab, page)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_million_lines(tab: Tab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test checks that a spike is drawn. It prints the time without a check, because machines differ."""
    folder = run(tmp_path / "long", [])
    draw = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for block in range(100):
            found = records(7100, seed=block)[:10_000]
            assert len(found) == 10_000
            for i, record in enumerate(found):
                record["step"] = 4000 * block + i * 4000 // 10_000 + 1
            if block == 57:
                next(r for r in found if r["kind"] == "step")["loss"] = 1000.0 + draw.random()
            file.write(lines(found))
    began = time.monotonic()
    page = write([folder])
    wrote = time.monotonic() - began
    seconds = [tab.open(page) for _ in range(5)]
    (faint, *_) = tab.evaluate("data.panels[0].traces")
    assert 1000 < max(faint["y"]) < 1001
    assert page.stat().st_size < 5_000_000
    assert_sound(tab, page)
    with capsys.disabled():
        opened = ", ".join(f"{each:.2f}" for each in seconds)
        size = f"{page.stat().st_size / 1e6:.2f} MB"
        print(f"\n1,000,000 lines: written in {wrote:.1f} s, {size}, all drawn after {opened} s")
    shutil.rmtree(folder)
