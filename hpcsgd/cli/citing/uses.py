"""The papers of every part that a job file may name, as keys of ``papers.bib``.

The papers of a method are in the method's file. Parts without a paper are listed, too, so that no part is
forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpcsgd.core.graphs import GRAPHS
from hpcsgd.data import PARTITIONS
from hpcsgd.methods import METHODS
from hpcsgd.methods.registry import PAPERS
from hpcsgd.methods.selsync import AGGREGATES
from hpcsgd.models import MODELS
from hpcsgd.parts.averagers.optimizer_state import OPTIMIZER_STATE
from hpcsgd.parts.averagers.pseudo_gradient_penalty import GUARDS
from hpcsgd.parts.averagers.radial_directional import MERGES
from hpcsgd.parts.averagers.selection import SELECTIONS
from hpcsgd.parts.averagers.sparse_message import CLIPS, MESSAGE_MEANS
from hpcsgd.parts.grad_reduces import GRAD_REDUCES
from hpcsgd.parts.grad_reduces.codecs import CODECS
from hpcsgd.parts.grad_reduces.combining import COMBINING
from hpcsgd.parts.grad_reduces.error_feedback import FEEDBACKS
from hpcsgd.parts.outer_schedules import OUTER_SCHEDULES
from hpcsgd.parts.quantizers import QUANTIZERS, ROUNDINGS
from hpcsgd.parts.schedules import LOCAL_STEPS
from hpcsgd.parts.sparsifiers import SPARSIFIERS
from hpcsgd.train.families import OPTIMIZERS
from hpcsgd.train.parts import OF_A_MODEL

Table = Mapping[str, Callable[..., Any]]
Papers = Mapping[str, Sequence[str]]

LEE, SELSYNC, SGP = "lee2020hierarchical", "tyagi2023selsync", "assran2019sgp"
EF = "karimireddy2019feedback"
OF_OPTIMIZERS: Papers = {
    "Adam": ["kingma2015adam"],
    "AdamW": ["loshchilov2019adamw"],
    "Muon": ["jordan2024muon", "liu2025muon"],
    "QHAdam": ["iacob2025mtdao", "ma2019quasi"],
}
"""Papers of optimizers. For other optimizers, see torch's documentation."""
RESNETS = [name for name in MODELS if "resnet" in name]


ENTRY = re.compile(r"^@\w+\{(\w+),$.*?^\}$", re.MULTILINE | re.DOTALL)
"""A pattern for one BibTeX entry; its group is the entry's key."""


def _keys(paper: str) -> Sequence[str]:
    """Return the keys of the BibTeX entries in the text `paper`, or `paper` itself if it is a key."""
    return ENTRY.findall(paper) or [paper] if paper else []


def _all(names: Iterable[str], *papers: str) -> Papers:
    """Return a dict that maps each of `names` to the same `papers`, of which there may be none."""
    return dict.fromkeys(names, papers)


USES: Sequence[tuple[Table, Papers]] = [
    (METHODS, {name: _keys(paper) for name, paper in PAPERS.items()}),
    (
        GRAD_REDUCES,
        {
            "alltoall": [LEE],
            "dense": [LEE],
            "quantized": ["wang2023zeropp", EF],
            "reduce_scatter": [LEE],
            "sparse": [],
        },
    ),
    (
        SPARSIFIERS,
        {
            "clt_k": ["chen2020scalecom"],
            "deft": ["yoon2023deft"],
            "exdyna": ["yoon2024exdyna"],
            "hard_threshold": ["sahu2021hard"],
            "micro": ["yoon2023micro"],
            "sidco": ["abdelmoniem2021sidco"],
            "topk": ["alistarh2018topk", "aji2017sparse"],
        },
    ),
    (
        FEEDBACKS,
        {
            "error_feedback": [EF],
            "momentum_correction": ["lin2018dgc"],
            "lr_in_error_feedback": ["yoon2023deft"],
        },
    ),
    (
        QUANTIZERS,
        {
            "bf16": ["kalamkar2019bfloat16"],
            "fp16": ["micikevicius2018mixed"],
            "int2": ["therien2025muloco"],
            "int4": ["wang2023zeropp", "douillard2025streaming"],
            "int8": ["dettmers2016eightbit", "wang2023zeropp"],
        },
    ),
    (ROUNDINGS, {"nearest": [EF], "stochastic": ["alistarh2017qsgd"]}),
    (
        GRAPHS,
        {
            "bipartite_exponential": [SGP],
            "complete": [],
            "exponential": [SGP],
            "powers_of_two": [SGP],
            "ring": ["lian2017dpsgd"],
            "undirected_exponential": [SGP],
        },
    ),
    (LOCAL_STEPS, {"dynamic": ["liu2024asynchronous"]}),
    (GUARDS, {"pseudo_gradient_penalty": ["cheng2025edit"]}),
    (MERGES, {"radial_directional": ["douillard2026decoupled"]}),
    (
        OUTER_SCHEDULES,
        {
            "muloco": ["therien2025muloco"],
            "piecewise": [],
            "pier": ["fan2025pier"],
            "pier_cosine": ["fan2025pier"],
        },
    ),
    (CLIPS, {"median_norm": ["lidin2026covenant"]}),
    (MESSAGE_MEANS, {"over_groups": ["sarfi2025sparseloco"], "over_senders": ["lidin2026covenant"]}),
    (SELECTIONS, {"across_shards": ["sarfi2025sparseloco"], "per_block": ["sarfi2025sparseloco"]}),
    (AGGREGATES, _all(AGGREGATES, SELSYNC)),
    (OPTIMIZER_STATE, _all(OPTIMIZER_STATE)),
    (CODECS, _all(CODECS)),
    (COMBINING, _all(COMBINING)),
    (OPTIMIZERS, {name: OF_OPTIMIZERS.get(name, []) for name in OPTIMIZERS}),
    (OF_A_MODEL, {name: OF_OPTIMIZERS.get(name, []) for name in OF_A_MODEL}),
    (
        PARTITIONS,
        {
            "by_label": [SELSYNC],
            "defdp": [SELSYNC],
            "dirichlet": [],
            "overlapping": [LEE],
            "seldp": [SELSYNC],
        },
    ),
    (
        MODELS,
        {
            "cnn": [],
            "alexnet": ["krizhevsky2014alexnet"],
            "edsr": ["lim2017edsr"],
            "gpt": ["radford2019gpt2", "su2021roformer", "zhang2019rmsnorm"],
            "lstm": ["zaremba2014lstm", "press2017tied"],
            "mlp": [],
            "ncf": ["he2017ncf"],
            "transformer": ["vaswani2017attention"],
            "vgg11": ["simonyan2015vgg"],
            **_all(RESNETS, "he2016resnet"),
        },
    ),
]
PRECISIONS: Papers = {
    "bf16": ["micikevicius2018mixed", "kalamkar2019bfloat16"],
    "bf16_master": ["micikevicius2018mixed", "kalamkar2019bfloat16"],
    "fp16": ["micikevicius2018mixed"],
}
OTHERS: Papers = {
    "activation_checkpointing": ["chen2016sublinear"],
    "injection": [SELSYNC],
    "muon_period": ["khaled2025muonbp"],
    "natural_gradient": ["povey2014natural"],
    "fsdp": ["rajbhandari2020zero", "zhao2023fsdp"],
    "overlap_share": [LEE],
}
"""Papers of other features, by the key of the job file that turns the feature on."""


def papers_of(table: Table, name: str) -> Sequence[str]:
    """Return the papers of the part called `name` in `table`; none for a part of the user's own."""
    return next(papers for known, papers in USES if known is table).get(name, ())
