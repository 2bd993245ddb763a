"""Pages that are made from files at the top of the repository, and the targets of their links."""

from __future__ import annotations

import repository


def test_all_of_the_readme_is_on_the_site() -> None:
    assert repository.pages()["index.md"] == (repository.ROOT / "README.md").read_text()


def test_links_go_to_the_same_things() -> None:
    text = "[a](docs/gpu.md#slurm), [b](CHANGELOG.md), ![c](docs/x.png), [d](https://far.away/y), [e](#f)"
    on_top = "[a](gpu.md#slurm), [b](changelog.md), ![c](x.png), [d](https://far.away/y), [e](#f)"
    assert repository.on_site(text, "", "index.md") == on_top
    below = "[a](../gpu.md#slurm), [b](../changelog.md), ![c](../x.png), [d](https://far.away/y), [e](#f)"
    assert repository.on_site(text, "", "methods/bsp.md") == below


def test_links_out_of_the_pages() -> None:
    text = "[a](gpu.md), [b](../CONTRIBUTING.md), [c](../jobs/sites/amd.toml), [d](../README.md#slurm)"
    expected = "[a](gpu.md), [b](contributing.md), [c](repository/jobs/sites/amd.toml), [d](index.md#slurm)"
    assert repository.on_site(text, "docs", "x.md") == expected
    assert repository.linked_files([("docs", text), ("", text)]) == ["jobs/sites/amd.toml"]
