"""Every error and warning of the package is on the page of messages; one that fits no part is refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import messages
from messages import Message, Part

ROOT = Path(__file__).parents[2]
RAISED = re.compile(r"^ +raise (UserError|JobError|NoWorld|PeerLost)\(", re.MULTILINE)
SOURCE = """
def why(x):
    return f"{x} is late" if x else "nobody is late"

def g(x):
    gone = f"rank {x} is gone"
    raise UserError(gone)

def other(x):
    gone = f"{x} went: "
    raise UserError(gone + "wait")

def f(x):
    log.warning("%s: %.3g s, %d %% of all", x, 1.0, 2)
    if x > 2:
        raise PeerLost("no " + ("answer" if x else "sign"))
    raise JobError(why(x))

def again(error):
    raise UserError(f"{error}: {error}") from error.reason
"""


@pytest.fixture(scope="module")
def found() -> list[Message]:
    return messages.found(ROOT / "hpcsgd")


def part(title: str, *of: str) -> Part:
    return Part(title, "x.md", of, "so")


@pytest.mark.slow
def test_every_message_has_a_place(found: list[Message]) -> None:
    placed = messages.by_part(messages.parts(), found)
    assert sorted(x for _, some in placed for x in some) == sorted(found)
    text = messages.page()
    assert text.count("\n- `` ") > 500
    assert all(part.cause.strip() in text for part, _ in placed)


@pytest.mark.slow
def test_every_source_that_raises_is_heard(found: list[Message]) -> None:
    sources = {path for path in (ROOT / "hpcsgd").rglob("*.py") if RAISED.search(path.read_text())}
    assert {path.relative_to(ROOT / "hpcsgd").as_posix() for path in sources} <= {x.path for x in found}
    assert len(sources) > 150


def test_messages_are_read_as_they_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    lost = messages.ERRORS["PeerLost"]
    assert set(messages.found(tmp_path)) == {
        Message("a.py", "%s: %.3g s, %d %% of all", messages.WARNING),
        Message("a.py", "no answer", lost),
        Message("a.py", "no sign", lost),
        Message("a.py", "… is late", ""),
        Message("a.py", "… went: wait", ""),
        Message("a.py", "nobody is late", ""),
        Message("a.py", "rank … is gone", ""),
    }


def test_a_count_is_read_with_its_noun() -> None:
    tree = ast.parse("""f"{count_text(n, 'rank')} of {n}: {count_text(n, noun)}" """, mode="eval")
    assert messages.said(tree.body) == "… ranks of …: …".replace("…", messages.OPEN)


def test_the_longest_beginning_decides() -> None:
    a, b = Message("a/x.py", "one", ""), Message("a/y.py", "two", "")
    whole, own = part("whole", "a/"), part("own", "a/y.py")
    assert messages.by_part([whole, own], [a, b]) == [(whole, [a]), (own, [b])]


def test_a_message_without_a_place_is_refused() -> None:
    with pytest.raises(messages.Unplaced, match=r"b/x\.py: 'one' has no place"):
        messages.by_part([part("a", "a/")], [Message("b/x.py", "one", ""), Message("a/x.py", "one", "")])


def test_a_part_without_messages_is_refused() -> None:
    with pytest.raises(messages.Unplaced, match=r"b/: no messages come from there"):
        messages.by_part([part("a", "a/", "b/")], [Message("a/x.py", "one", "")])


@pytest.mark.slow
def test_what_is_explained_elsewhere_leads_there() -> None:
    text = messages.page()
    assert "a world of …: the launcher does not fit" in text
    for line in text.splitlines():
        if "a world of …: the launcher does not fit" in line:
            assert line.endswith("[Starting](troubleshooting.md#starting)")
        if "no answer within" in line and "sbatch" not in line and "exit code 69" in line:
            assert line.endswith(": [While it runs](troubleshooting.md#while-it-runs)")


def test_placeholders_are_dots_on_the_page() -> None:
    line = messages.shown(Message("a.py", "%s: %.3g s, %d %% of all……", messages.WARNING))
    assert line == "`` …: … s, … % of all… `` (a warning)"
