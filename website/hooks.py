"""The hooks that mkdocs calls. They add generated pages to those of docs/."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import api
import figures
import job_file
import messages
import method_pages
import names
import repository
from repository import ROOT

ASSETS = ("iframe-worker.js", "site.css")
"""Files of this folder that pages load."""
FOR_DEVELOPERS = ("changelog.md", "contributing.md", "repository/")
BOOSTS = dict.fromkeys(FOR_DEVELOPERS, 0.01) | {"messages.md": 0.5, "api/": 0.7}
"""Beginnings of pages' paths, with the weights of these pages in a search; guides have 1."""
CONTINUED: Mapping[str, Callable[[], str]] = {
    "job_file.md": lambda: job_file.tables() + names.table(),
    "messages.md": messages.page,
    "methods.md": method_pages.listed,
    "performance.md": lambda: repository.on_site(figures.table(), "", "performance.md"),
}
"""Pages of docs/ at whose end generated text is appended, with the functions that generate it."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page for each method of the table of methods to the navigation, so that none is forgotten."""
    assert config.nav is not None
    (methods,) = (item["Methods"] for item in config.nav if "Methods" in item)
    methods.insert(1, {"Each method": sorted(method_pages.pages())})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = repository.pages()
    texts = [("", text) for text in (*made.values(), figures.table())]
    texts += [("docs", page.content_string) for page in files.documentation_pages()]
    of_code = api.pages() | method_pages.pages()
    written = {uri: repository.on_site(text, "", uri) for uri, text in made.items()} | of_code
    for uri, text in written.items():
        files.append(File.generated(config, uri, content=text))
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(Path(__file__).parent / name)))
    for path in repository.linked_files(texts):
        place = repository.place_of(path)
        if path.endswith(".md"):  # a page, whose links are relative to its place in the repository
            text = repository.on_site((ROOT / path).read_text(), posixpath.dirname(path), place)
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert the links of a page of docs/, which are right on a code host, to links of the site."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if page.file.generated_by is not None:
        return markdown
    more = CONTINUED.get(page.file.src_uri)
    return repository.on_site(markdown, "docs", page.file.src_uri) + (more() if more else "")
