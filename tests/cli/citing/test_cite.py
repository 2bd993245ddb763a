"""Users are told which papers to cite: every part has its papers, and every paper has its entry."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import hpcsgd
from hpcsgd.cli.citing.bibtex import cite, entries
from hpcsgd.cli.citing.uses import OTHERS, PRECISIONS, USES
from hpcsgd.data import PARTITIONS
from hpcsgd.errors import UserError
from hpcsgd.methods import METHODS
from hpcsgd.methods.registry import PAPERS
from hpcsgd.models import MODELS
from hpcsgd.train.families import FAMILIES
from hpcsgd.train.parts import OF_A_MODEL
from test_docstrings import NO_PAPER
from train.launches import JOB

ROOT = Path(__file__).parents[3]
PUBLIC = {getattr(hpcsgd, name): name for name in hpcsgd.__all__ if callable(getattr(hpcsgd, name))}


def keys(text: str) -> list[str]:
    return re.findall(r"^@\w+\{(\w+),$", text, re.MULTILINE)


def test_every_table_has_its_papers() -> None:
    tables = {id(table) for table in (*FAMILIES.values(), OF_A_MODEL, PARTITIONS, MODELS)}
    assert {id(table) for table, _ in USES} == tables


@pytest.mark.parametrize("use", USES, ids=lambda use: next(iter(use[0])))
def test_every_part_has_its_papers_or_none(use: Any) -> None:
    """A part with references in its docstring has papers, which have the arXiv numbers of the references."""
    table, papers = use
    assert papers.keys() == table.keys()
    for name, part in table.items():
        known = entries()
        found = "".join(known[key] for key in papers[name])
        source = (part.__doc__ or "").partition("References:")[2]
        for number in re.findall(r"\d{4}\.\d{5}", source):
            assert number in found, (name, number)
        if source and PUBLIC.get(part) not in NO_PAPER and name not in ("bsp", "sparse"):
            assert papers[name], name


def test_every_paper_is_of_something_and_every_key_is_there() -> None:
    tables = [papers for _, papers in USES] + [PRECISIONS, OTHERS]
    assert {key for papers in tables for keys in papers.values() for key in keys} == entries().keys()


def test_keys_are_unique_and_nothing_is_left_over() -> None:
    """This holds for the file of all parts and for those of methods."""
    shared = (ROOT / "hpcsgd/cli/citing/papers.bib").read_text().rstrip("\n")
    own = [paper for paper in PAPERS.values() if paper.startswith("@")]
    assert sorted(keys("\n".join([shared, *own]))) == sorted(entries())
    assert "\n\n".join(entries().values()) == "\n\n".join([shared, *own])
    shared_by_methods = {paper for paper in PAPERS.values() if paper and not paper.startswith("@")}
    assert shared_by_methods <= set(keys(shared))


def test_the_bibtex_is_read(job: Path) -> None:
    database = pytest.importorskip("pybtex.database")
    text = "\n\n".join([*entries().values(), cite(job)])
    read = database.parse_string("\n\n".join(entries().values()), "bibtex")
    assert set(read.entries) == set(entries())
    for entry in [*read.entries.values(), *database.parse_string(cite(job), "bibtex").entries.values()]:
        assert entry.fields["title"]
        assert entry.persons["author"]
    assert text.count("{") == text.count("}")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


LOCAL = 'name = "hierarchical"\nsync_every = 2\n'
SPARSE = """
grad_reduce.name = "sparse"
grad_reduce.sparsifier = { name = "deft", density = 0.1 }
grad_reduce.feedback = { name = "momentum_correction", momentum = 0.9 }
"""
LATE = """
name = "delayed"
sync_delay = 2
method = { name = "diloco", sync_every = 4, outer = { name = "Adam", lr = 1 } }
"""


@pytest.mark.parametrize(
    ("method", "words", "found"),
    [
        (LOCAL, "", ["lee2020hierarchical"]),
        ('name = "bsp"', "", []),
        (LOCAL + SPARSE, "", ["lee2020hierarchical", "lin2018dgc", "yoon2023deft"]),
        (LOCAL + SPARSE.replace("deft", "micro"), "", ["lee2020hierarchical", "lin2018dgc", "yoon2023micro"]),
        (
            LOCAL + SPARSE.replace("deft", "exdyna"),
            "",
            ["lee2020hierarchical", "lin2018dgc", "yoon2024exdyna"],
        ),
        (LATE, "", ["douillard2023diloco", "kingma2015adam", "zhou2020dasgd"]),
        ('name = "sgp"\ngraph = "ring"', "", ["assran2019sgp", "lian2017dpsgd"]),
        (
            LOCAL + 'quantize = "int8"',
            "--model.name resnet20 --optimizer.name Muon",
            [
                *("dettmers2016eightbit", "he2016resnet", "jordan2024muon", "lee2020hierarchical"),
                *("liu2025muon", "wang2023zeropp"),
            ],
        ),
        (
            'name = "bsp"',
            "--optimizer.name Muon --optimizer.arguments {period=5}",
            ["jordan2024muon", "khaled2025muonbp", "liu2025muon"],
        ),
        (
            'name = "bsp"',
            "--data.partition {name='seldp'} --training.precision fp16 "
            "--training.activation_checkpointing true --optimizer.natural_gradient {rank=4}",
            ["chen2016sublinear", "micikevicius2018mixed", "povey2014natural", "tyagi2023selsync"],
        ),
        ('name = "bsp"', "--parallel.fsdp true", ["rajbhandari2020zero", "zhao2023fsdp"]),
    ],
)
def test_what_a_job_uses(job: Path, method: str, words: str, found: list[str]) -> None:
    assert LOCAL in JOB
    job.write_text(JOB.replace(LOCAL, method + "\n"))
    first, *others = keys(cite(job, words.split()))
    assert first == "hpcsgd"
    assert sorted(others) == found


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_looked_up(name: str) -> None:
    assert name in next(papers for table, papers in USES if table is METHODS)


def test_of_the_folder_of_a_run(job: Path) -> None:
    assert cite(job.parent) == cite(job)


def test_a_mistake_is_reported(job: Path) -> None:
    with pytest.raises(UserError, match=r"job.toml: \[method\] name: no 'hierachical'; did you mean"):
        cite(job, ["--method.name", "hierachical"])


def test_a_model_of_ones_own_has_none(job: Path) -> None:
    assert keys(cite(job, ["--model.name", "mine:net"])) == ["hpcsgd", "lee2020hierarchical"]


def test_the_citation_file() -> None:
    """The file has the form of Citation File Format 1.2.0."""
    text = (ROOT / "CITATION.cff").read_text()
    for field in ("cff-version: 1.2.0", "message:", "title:", "authors:", "type: software"):
        assert re.search(rf"^{field}", text, re.MULTILINE), field
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in text
    assert f"\nlicense: {project['license']}\n" in text
    assert project["authors"][0]["name"] in text
