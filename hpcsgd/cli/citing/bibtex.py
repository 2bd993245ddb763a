"""BibTeX entries for the parts that a job file uses, and for hpcsgd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from hpcsgd.cli.citing.uses import ENTRY, OTHERS, PRECISIONS, papers_of
from hpcsgd.config.parts import Parts
from hpcsgd.config.reader import as_table
from hpcsgd.config.schema import Config, MethodSection, load
from hpcsgd.core.method import Method
from hpcsgd.data import PARTITIONS
from hpcsgd.errors import in_file
from hpcsgd.methods.registry import PAPERS
from hpcsgd.models import MODELS
from hpcsgd.report.run_folder import JOB_FILE
from hpcsgd.train.families import FAMILIES
from hpcsgd.train.parts import OF_A_MODEL


def cite(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the BibTeX entries for a job file or a run's folder.

    Raises `UserError` for a job file that could not be trained.
    """
    path = path / JOB_FILE if path.is_dir() else path
    config = load(path, overrides)
    with in_file(path):
        keys = dict.fromkeys([*_of_method(config.method), *_of_the_rest(config)])
    known = entries()
    return "\n\n".join([_software(), *(known[key] for key in keys)])


def entries() -> Mapping[str, str]:
    """Return all BibTeX entries by key, from ``papers.bib`` and from the files of methods."""
    shared = (files("hpcsgd.cli.citing") / "papers.bib").read_text(encoding="utf-8")
    text = "\n\n".join([shared, *PAPERS.values()])
    return {match[1]: match[0] for match in ENTRY.finditer(text)}


def _of_method(section: MethodSection) -> list[str]:
    """Return the BibTeX keys of the method's papers, in the order in which its parts are made."""
    found: list[str] = []
    families = {kind: _RecordsPapers(table, found) for kind, table in FAMILIES.items()}
    Parts(families, steps_per_epoch=1, total_steps=10**9).make(Method, as_table(section), "method")
    return found


class _RecordsPapers(Mapping[str, Callable[..., Any]]):
    """A mapping from names to parts; each look-up adds the papers of the part to the list `found`."""

    def __init__(self, table: Mapping[str, Callable[..., Any]], found: list[str]) -> None:
        self._table, self._found = table, found

    def __getitem__(self, name: str) -> Callable[..., Any]:
        part = self._table[name]
        self._found += papers_of(self._table, name)
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def _of_the_rest(config: Config) -> Iterator[str]:
    data = config.data
    if data.partition is not None:
        yield from papers_of(PARTITIONS, str(data.partition.get("name")))
    yield from papers_of(OF_A_MODEL, config.optimizer.name)
    yield from papers_of(MODELS, config.model.name)
    yield from PRECISIONS.get(config.training.precision, ())
    asked = {
        "overlap_share": data.overlap_share,
        "injection": data.injection,
        "muon_period": config.optimizer.name == "Muon" and config.optimizer.arguments.get("period"),
        "natural_gradient": config.optimizer.natural_gradient,
        "activation_checkpointing": config.training.activation_checkpointing,
        "fsdp": config.parallel.fsdp,
    }
    for key, value in asked.items():
        if value is not None and value is not False:
            yield from OTHERS[key]


def _software() -> str:
    return "\n".join(
        [
            "@software{hpcsgd,",
            "  title = {{hpcsgd}: Hierarchical and Communication-Saving {SGD} for {PyTorch} over {MPI}},",
            "  author = {{The hpcsgd authors}},",
            f"  version = {{{version('hpcsgd')}}},",
            "  year = {2026},",
            "}",
        ]
    )
