"""Every public name has an entry in the API reference, with what its docstring says."""

from __future__ import annotations

import re

import api
import method_pages
import public_names

ENTRY = re.compile(r"^\[\]\(\)\{#(hpcsgd\.[\w.]+)\}\n\n::: ([\w.]+)$", re.MULTILINE)


def test_every_public_name_has_one_entry() -> None:
    names, written = public_names.public(), api.pages() | method_pages.pages()
    found = [entry for text in written.values() for entry in ENTRY.findall(text)]
    assert sorted(found) == sorted((f"hpcsgd.{name}", public_names.path(x)) for name, x in names.items())
    assert len(found) > 70


def test_the_index_has_all_of_them() -> None:
    index = api.pages()["api/index.md"]
    for name in public_names.public():
        assert f"#hpcsgd.{name})" in index
    assert "four ranks have a `topology` of 2 groups of 2" in index


def test_names_stand_where_they_belong() -> None:
    names = public_names.public()
    found = {name: api.page_of(name, x) for name, x in names.items()}
    expected = {
        "sgp": "methods", "Method": "training", "Deft": "gradients", "Quantized": "gradients",
        "keep_state": "averagers", "graphs.Ring": "graphs", "quantizers.int4": "quantizers", "SelDP": "data",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert set(found.values()) == set(api.TITLES)
