"""Every table and figure of the papers is on the page, in the lists and among the original settings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from harness import Goal
from hpcsgd.config.schema import load
from papers.artifact import DRAWN, NOT_YET, RESULTS, Artifacts, Beside, main, outcome, page, words
from papers.at_scale import Job, write

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks/papers/README.md").read_text()
SUMMARY = (ROOT / "docs/papers.md").read_text()
NUMBERED = {
    "deft": (2, 10),
    "ensemblesync": (0, 5),
    "hierarchical": (2, 11),
    "selsync": (1, 12),
    "sgp": (4, 5),
}
"""The number of tables and the number of figures of each paper."""
CHEAP = [("selsync", "Figure 8"), ("sgp", "Figure 5")]


def artifacts(paper: str) -> Artifacts:
    return import_module(f"papers.{paper}").ARTIFACTS


def missing(paper: str, text: str) -> list[str]:
    """Return the lines that the page should have and does not have."""
    return [line for line in page(artifacts(paper)) if line not in text.splitlines()]


@pytest.mark.parametrize("paper", NUMBERED)
def test_none_is_missing(paper: str) -> None:
    tables, figures = NUMBERED[paper]
    expected = [f"Table {n + 1}" for n in range(tables)] + [f"Figure {n + 1}" for n in range(figures)]
    assert sorted(artifacts(paper)) == sorted(expected)


@pytest.mark.parametrize("paper", NUMBERED)
def test_the_page_has_them_as_they_were_measured(paper: str) -> None:
    assert missing(paper, PAGE) == []


@pytest.mark.parametrize("paper", NUMBERED)
def test_the_summary_says_how_many_are_as_in_the_paper(paper: str) -> None:
    assert outcome(artifacts(paper)) in " ".join(SUMMARY.split())


def test_the_outcome_names_what_is_not_as_in_the_paper() -> None:
    all_of = artifacts("selsync")
    met = {name: all_of[name] for name in ("Figure 1", "Figure 6")}
    assert outcome(met) == "1 of 1 are as in the paper."
    missed = {name: all_of[name] for name in ("Table 1", "Figure 1", "Figure 5")}
    assert outcome(missed) == "1 of 3 are as in the paper; table 1 in part; figure 5 not."


def test_a_line_that_says_otherwise_is_found() -> None:
    assert missing("hierarchical", PAGE.replace("64.70", "65.70")) != []


def test_what_is_measured_has_an_original_setting_or_says_why() -> None:
    for paper in NUMBERED:
        for name, each in artifacts(paper).items():
            assert each.small is None or each.jobs is not None or each.why, (paper, name)


def test_results_of_the_papers_belong_to_somebody() -> None:
    kept = {path.relative_to(RESULTS).as_posix() for path in RESULTS.glob("papers/*.json")}
    named = {each.small.result for paper in NUMBERED for each in artifacts(paper).values() if each.small}
    assert kept <= named
    for name in kept:
        assert not re.search(
            r"/tmp|/work|/home", " ".join(json.loads((RESULTS / name).read_text())["command"])
        )


@pytest.mark.parametrize("paper", NUMBERED)
def test_they_are_listed(paper: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(paper, artifacts(paper), ["--list"])
    said = capsys.readouterr().out
    for name, each in artifacts(paper).items():
        (line,) = (line for line in said.splitlines() if line.startswith(f"{name} "))
        assert each.what in line
        assert (DRAWN in line) == (each.small is None)


@pytest.mark.parametrize(("paper", "name"), CHEAP)
def test_ours_is_beside_the_papers(
    paper: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    main(paper, artifacts(paper), [*words(name), "--quick", "--json", str(out), "--data", str(tmp_path)])
    assert "as in the paper: " in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["rows"]
    assert result["goals"]
    assert result["machine"]


@pytest.mark.slow
@pytest.mark.parametrize("paper", NUMBERED)
def test_what_was_measured_is_shown_and_drawn(
    paper: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, each in artifacts(paper).items():
        if each.small is None or not each.small.file.exists():
            continue
        picture = tmp_path / f"{name}.png"
        main(paper, artifacts(paper), [*words(name), "--kept", "--plot", str(picture)])
        assert f"{name}, ours beside the paper's" in capsys.readouterr().out
        assert picture.exists() == (each.small.panels is not None)


@pytest.mark.slow
@pytest.mark.parametrize("paper", NUMBERED)
def test_original_settings_are_job_files_and_scripts(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = {
        topology.name: topology for each in artifacts(paper).values() if each.jobs for topology in each.jobs()
    }
    assert jobs
    for order in write(list(jobs.values()), tmp_path / "data", tmp_path / "out"):
        text = order.script.read_text()
        path = tmp_path / "out" / f"{order.script.name.rsplit('-', 1)[0]}.toml"
        assert str(path) in text
        assert f"#SBATCH --nodes={order.allocation.nodes}\n" in text
        load(path)


def test_names_of_jobs_are_theirs_alone() -> None:
    for paper in NUMBERED:
        seen: dict[str, Job] = {}
        for each in artifacts(paper).values():
            for topology in each.jobs() if each.jobs else ():
                assert seen.setdefault(topology.name, topology) == topology


def test_direction_is_what_the_goals_say() -> None:
    met, missed = Goal("a", 1, 2), Goal("b", 3, 2)
    said = [Beside([], [], "", "", goals).direction for goals in ([met], [met, missed], [missed])]
    assert said == ["yes", "in part", "no"]


def test_what_was_not_measured_is_reported() -> None:
    each = artifacts("hierarchical")["Figure 5"]
    assert each.small is not None
    lost = {"Figure 5": replace(each, small=replace(each.small, result="papers/gone.json"))}
    assert NOT_YET in page(lost)[0]
    with pytest.raises(SystemExit, match=NOT_YET):
        main("hierarchical", lost, ["--figure", "5", "--kept"])
