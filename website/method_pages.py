"""The page of each method: its algorithm from the module's docstring, what it sends, and its API entry."""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import tomli_w

import api
import hpcsgd
import pictures
from hpcsgd.cli.citing.bibtex import entries
from hpcsgd.cli.citing.uses import papers_of
from hpcsgd.core.traffic import BucketLayout, ModelLayout
from hpcsgd.cost.collectives import sent
from hpcsgd.cost.traffic import of_step
from hpcsgd.engine.plan import StepPlan
from hpcsgd.methods import METHODS, Method
from public_names import needed, summary
from repository import ROOT

INSIDE = {"bsp()": hpcsgd.bsp(), "hierarchical(sync_every=8)": hpcsgd.hierarchical(sync_every=8)}
GIVEN = {
    "adapt_every": 100, "at": 1000, "delta": 0.3, "first": INSIDE["bsp()"], "fraction": 0.5,
    "initial_sync_every": 8, "max_staleness": 1, "num_fragments": 4, "overlap_steps": 1, "per_epoch": 4,
    "steps_per_epoch": 100, "sync_delay": 2, "sync_every": 8, "total_steps": 10_000,
    "then": INSIDE["hierarchical(sync_every=8)"], "method": INSIDE["hierarchical(sync_every=8)"],
}  # fmt: skip
"""The values that the example of a method has for arguments without a default."""
SYNC_RATE = 0.2
"""The share of steps with a synchronization, for methods that decide this while they train."""
P, K, M, WIDTH = 4, 4, 4_000_000, 4
LEAST = 1e-4
"""The smallest share of M that a table shows as a number; anything smaller does not grow with the model."""
MORE = re.compile(r"^<!-- methods: (.+) -->$", re.MULTILINE)
"""The comment by which a page in docs/ says which methods it describes."""
SENDS = """
## What it sends

The table shows what a rank sends per step on average, in units of the model's M elements. The cost model
computes it as for `hpcsgd plan`, for {example} with {P} groups of {K} ranks. A synchronization every n steps
counts 1/n.
"""
SENT = """
| phase | operation | among | sent per step, in M |
|---|---|---|---|
"""
TRAINING = """
## How it trains

![training loss, distance of the groups and test accuracy by steps](../training/{name}.png)

Four groups of one rank train on handwritten digits for {epochs} epochs, with one seed. The grey lines are
`bsp` with the same ranks and samples. The picture shows how training with this method looks, and not how good
the method is; [which method to choose](../choosing.md) does that. `python website/pictures.py {name}` made
it, with this section of a job file:

```toml
{section}```

"""
CITED = """
## Citation

This is the paper of the method. `hpcsgd cite job.toml` prints all papers that a job uses, and hpcsgd itself.

```bibtex
{entries}
```

"""
UNPUBLISHED = """
## Citation

No paper describes this method. `hpcsgd cite job.toml` prints all papers that a job uses, and hpcsgd itself.

"""
AMONG = {
    "intra_group": "a group",
    "inter_group": "the groups",
    "world": "all ranks",
    "replica_groups": "replica groups",
}


def pages() -> dict[str, str]:
    return {f"methods/{name}.md": page(name, METHODS[name]) for name in METHODS}


def listed() -> str:
    told = {x: summary(METHODS[x]).removeprefix("Return ") for x in METHODS}
    rows = "".join(f"| [`{x}`](methods/{x}.md) | {told[x][0].upper()}{told[x][1:]} |\n" for x in METHODS)
    return f"\n## Each method\n\n| | |\n|---|---|\n{rows}"


def page(name: str, factory: Callable[..., Method]) -> str:
    title, _, rest = inspect.cleandoc(sys.modules[factory.__module__].__doc__ or "").partition("\n\n")
    pages = [uri for uri, names in more().items() if name in names]
    links = ", ".join(f"[{uri.removesuffix('.md')}](../{uri})" for uri in pages)
    links = f"See also: {links}.\n\n" if links else ""
    made = sends(name, factory) + training(name) + citation(name)
    return f"# {name}\n\n{title}\n\n{links}{rest}\n{made}\n{api.entry(name, factory)}"


def more() -> dict[str, list[str]]:
    """Return the pages in docs/ that describe methods, with the names of these methods."""
    found = {path.name: MORE.search(path.read_text()) for path in sorted((ROOT / "docs").glob("*.md"))}
    return {page: match[1].split(", ") for page, match in found.items() if match}


def training(name: str) -> str:
    job = pictures.job(name, Path("digits.h5"))
    section = tomli_w.dumps({"method": job["method"]})
    return TRAINING.format(name=name, section=section, epochs=job["training"]["epochs"])


def citation(name: str) -> str:
    known = entries()
    papers = [known[key] for key in papers_of(METHODS, name)]
    return CITED.format(entries="\n\n".join(papers)) if papers else UNPUBLISHED


def sends(name: str, factory: Callable[..., Method]) -> str:
    """Return one table, or one for each of the methods between which this method changes."""
    plan = StepPlan.of(example(factory))
    tables = [table(stage) for _, stage in plan.sequence] or [table(plan)]
    return SENDS.format(example=f"`{called(name, factory)}`", P=P, K=K) + "\nThen:\n".join(tables)


def table(plan: StepPlan) -> str:
    """Return the table of what a rank sends per step of one method."""
    found = defaultdict[tuple[str, str, str], float](float)
    for x in of_step(plan, sizes(), sync_rate=SYNC_RATE):
        of_rank = sent(x.operation, x.nbytes, sizes().ranks(x.over))
        found[x.phase, x.operation, AMONG[x.over]] += (
            float(of_rank) * x.times * x.sender_fraction / (M * WIDTH)
        )
    return SENT + "".join(
        f"| {' | '.join(key)} | {_told(share)} |\n" for key, share in found.items() if share
    )


def _told(share: float) -> str:
    return "some bytes" if share < LEAST else f"{share:.3g}"


def sizes() -> ModelLayout:
    return ModelLayout(P, K, buckets=(BucketLayout(M, M, WIDTH),), layers=(M,))


def example(factory: Callable[..., Method]) -> Method:
    return factory(**{name: GIVEN[name] for name in needed(factory)})


def called(name: str, factory: Callable[..., Method]) -> str:
    words = {id(method): text for text, method in INSIDE.items()}
    given = (f"{x}={words.get(id(GIVEN[x]), repr(GIVEN[x]))}" for x in needed(factory))
    return f"{name}({', '.join(given)})"
