"""`make docs` builds the complete site without a warning, and fails if a link has no target."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import programs
import public_names

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)|<link\b[^>]*\bhref=\"([^\"]+)")
FAR = re.compile(r"(https?:)?//")
ENTRY = re.compile(
    r'<a href="" id="hpcsgd\.([\w.]+)"></a>(.*?)(?=<a href="" id="hpcsgd\.|</article>)', re.DOTALL
)
BUILD = 400.0
"""Seconds that a build may take; on a busy machine one took more than a hundred."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(BUILD + 20),
    pytest.mark.skipif(find_spec("material") is None, reason="needs the extra [docs]"),
]


def build(config: Path, site: Path) -> programs.Done:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return programs.run(command, cwd=ROOT, env=quiet, check=False, timeout=BUILD)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def fetched(site: Path) -> list[str]:
    """Return the addresses that a reader's browser would load from other hosts."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    loaded = [link for text in texts.values() for found in LOADED.findall(text) for link in found]
    styles = [link for path in site.rglob("*.css") for link in re.findall(r"url\(([^)]+)", path.read_text())]
    drawn = [str(path) for path, text in texts.items() if 'class="mermaid"' in text]  # needs a remote script
    return [link for link in loaded + styles if FAR.match(link.strip("\"'"))] + drawn


def test_nothing_is_fetched(site: Path) -> None:
    assert fetched(site) == []


def test_what_is_fetched_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="x" href="https://far.away/a.css"><script src="//far.away/b.js"></script><img src="c.png">'
    )
    (tmp_path / "a.css").write_text("a { b: url('https://far.away/d.woff') }")
    assert fetched(tmp_path) == ["https://far.away/a.css", "//far.away/b.js", "'https://far.away/d.woff'"]


def test_every_page_and_picture_is_there(site: Path) -> None:
    for path in (ROOT / "docs").iterdir():
        assert (site / path.name).with_suffix({".md": ".html"}.get(path.suffix, path.suffix)).exists(), path
    assert (site / "repository/benchmarks/results/gossip.png").exists()
    assert (site / "search/search_index.js").exists()  # for pages opened from files


def unrendered(site: Path) -> list[str]:
    """Return the public names whose entry is missing, or lacks an argument, an example or a reference."""
    text = "".join(path.read_text() for path in sorted(site.rglob("*.html")))
    found = dict(ENTRY.findall(text))
    lost = []
    for name, documented in public_names.public().items():
        entry = found.get(name, "")
        told = [part in (documented.__doc__ or "") for part in ("Args:", "References:", ">>> ")]
        shown = [part in entry for part in (">Parameters:<", ">References<", "&gt;&gt;&gt; ")]
        if told != shown:
            lost.append(name)
    return lost


def test_every_public_name_is_rendered(site: Path) -> None:
    assert unrendered(site) == []


def test_what_is_not_rendered_is_found(site: Path, tmp_path: Path) -> None:
    text = "".join(path.read_text() for path in sorted(site.rglob("*.html")))
    (tmp_path / "a.html").write_text(
        text.replace('id="hpcsgd.quantizers.int8"', "").replace("hpcsgd.sgp", "hpcsgd.sg")
    )
    assert unrendered(tmp_path) == ["sgp", "quantizers.int8"]


@pytest.mark.parametrize(
    "link",
    [
        "[a](lost.md)",
        *(
            pytest.param(link, marks=pytest.mark.long)
            for link in ("[a](index.md#lost)", "![a](lost.png)", "[a](/index.md)")
        ),
    ],
)
def test_a_lost_link_ends_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Planted\n\n{link}\n")
    config = f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: {tmp_path}/docs\nhooks: []\nnav: [index.md]\n"
    (tmp_path / "mkdocs.yml").write_text(config + "plugins: [search]\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "Aborted with 1 warnings" in done.stderr or "Aborted with 1 warnings" in done.stdout
