"""What a result says about its run, and when it is marked as disturbed."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import programs
from harness import Goal, Run, record
from harness.load import Load
from harness.record import code

ROWS = [{"who": "A", "seconds": 1.0}]


def run_beside(others: int) -> Run:
    return Run(Load(lambda: others, every=60))


def concluded(run: Run, file: Path) -> dict:
    run.conclude(ROWS, [Goal("seconds", 1.0, 2.0)], file, {"hosts": 4})
    return json.loads(file.read_text())


def test_a_result_beside_others_is_marked(tmp_path, capsys):
    result = concluded(run_beside(2), tmp_path / "result.json")
    assert result["disturbed"] is True
    assert result["load"]["without_us"] == 2.0
    assert "DISTURBED: the load without us was above 1" in capsys.readouterr().out


def test_beside_one_it_is_not(tmp_path, capsys):
    result = concluded(run_beside(1), tmp_path / "result.json")
    assert result["disturbed"] is False
    assert "DISTURBED" not in capsys.readouterr().out


def test_a_disturbed_result_replaces_none_that_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    file = tmp_path / "papers" / "result.json"
    file.parent.mkdir()
    concluded(run_beside(0), file)
    kept = file.read_text()
    run_beside(2).conclude(ROWS, [], file)
    assert file.read_text() == kept
    assert json.loads(file.with_suffix(".disturbed.json").read_text())["disturbed"] is True
    assert "NOT KEPT as result.json" in capsys.readouterr().out


def test_without_seconds_it_does_not_matter_what_else_runs(tmp_path):
    run = Run(Load(lambda: 2, every=60), timed=False)
    result = concluded(run, tmp_path / "result.json")
    assert result["disturbed"] is False
    assert result["load"]["without_us"] == 2.0


def test_rows_kept_from_a_marked_result_mark_the_next(tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    earlier = concluded(run_beside(2), first)
    capsys.readouterr()
    run = run_beside(0)
    assert run.kept(first) == ROWS
    result = concluded(run, second)
    assert result["disturbed"] is True
    assert result["load"]["without_us"] == 0.0
    assert [kept["date"] for kept in result["kept"]] == [earlier["date"]]
    told = capsys.readouterr().out
    assert f"with rows kept from a run of {earlier['date']}" in told
    assert "DISTURBED" in told


def test_older_results_do_not_say(tmp_path, capsys):
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"command": ["python"], "rows": ROWS}))
    run = run_beside(0)
    assert run.kept(old) == ROWS
    assert concluded(run, tmp_path / "new.json")["disturbed"] is False
    assert "from a run of an unknown date, commit unknown" in capsys.readouterr().out


def test_rows_whose_times_do_not_count_may_be_of_a_marked_result(tmp_path, capsys):
    first = tmp_path / "first.json"
    assert concluded(run_beside(2), first)["disturbed"] is True
    run = run_beside(0)
    assert run.kept(first, timed=False) == ROWS
    assert concluded(run, tmp_path / "next.json")["disturbed"] is False


@pytest.mark.parametrize(("text", "divided"), [("1\n", True), ("0\n", False), (None, None)])
def test_a_result_says_whether_cores_are_divided_among_sessions(tmp_path, monkeypatch, text, divided):
    monkeypatch.setattr(record, "AUTOGROUP", tmp_path / "autogroup")
    if text is not None:
        record.AUTOGROUP.write_text(text)
    assert record.machine()["autogroup"] is divided


def test_without_a_file_nothing_is_kept():
    assert run_beside(0).kept(None) == []


def test_a_result_says_when_and_of_what(tmp_path):
    result = concluded(run_beside(0), tmp_path / "result.json")
    date = datetime.fromisoformat(result["date"])
    assert date.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - date) < timedelta(minutes=1)
    assert {"commit", "dirty", "versions", "command"} <= set(result)
    assert result["machine"]["hosts"] == 4
    assert result["goals"] == [{"name": "seconds", "value": 1.0, "goal": 2.0, "met": True}]
    assert result["rows"] == ROWS


def test_the_command_names_paths_from_the_root_wherever_it_was_given(tmp_path, monkeypatch):
    words = ["step_overhead.py", "--json", "results/no.json", "--only", "bsp/x", "--quick", "/dev/null"]
    monkeypatch.chdir(record.BENCHMARKS)
    monkeypatch.setattr("sys.argv", words)
    command = concluded(run_beside(0), tmp_path / "result.json")["command"]
    paths = ["benchmarks/step_overhead.py", "--json", "benchmarks/results/no.json"]
    assert command[1:] == [*paths, "--only", "bsp/x", "--quick", "/dev/null"]


def test_what_there_is_so_far_says_the_same_of_the_run(tmp_path):
    run_beside(2).write(tmp_path / "part.json", ROWS)
    part = json.loads((tmp_path / "part.json").read_text())
    assert (part["rows"], part["goals"], part["disturbed"]) == (ROWS, [], True)


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    if shutil.which("git") is None:
        pytest.skip("no git")
    for name in ("hpcsgd", "csrc", "benchmarks", "benchmarks/results", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("as committed")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@example.org")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        programs.run(["git", "-C", tmp_path, *words])
    return tmp_path


def test_the_commit(repository):
    words = ["git", "-C", repository, "log", "-1", "--format=%H"]
    commit = programs.run(words).stdout.strip()
    assert code(repository) == {"commit": commit, "dirty": False}


@pytest.mark.parametrize("changed", ["hpcsgd/file", "csrc/file", "benchmarks/file", "hpcsgd/new"])
def test_changes_of_what_is_measured_are_reported(repository, changed):
    (repository / changed).write_text("changed")
    assert code(repository)["dirty"] is True


@pytest.mark.parametrize("changed", ["benchmarks/results/file", "docs/file", "new"])
def test_changes_of_what_is_written_about_it_are_not(repository, changed):
    (repository / changed).write_text("changed")
    assert code(repository)["dirty"] is False


def test_outside_of_git_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code(tmp_path) == {"commit": None, "dirty": None}
