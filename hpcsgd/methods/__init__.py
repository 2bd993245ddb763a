"""The table of methods by name, and the parts that a job file may name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcsgd.averagers import Averaged, Reset, kept
from hpcsgd.core.graphs import (
    BipartiteExponential,
    Complete,
    Exponential,
    PowersOfTwo,
    Ring,
    UndirectedExponential,
)
from hpcsgd.core.method import Method
from hpcsgd.exchanges import (
    AllToAll,
    ErrorFeedback,
    Gaps,
    MomentumCorrection,
    Plain,
    RateInside,
    ReduceScatter,
    Sparse,
    everyones,
    own,
)
from hpcsgd.methods.ad_psgd import ad_psgd
from hpcsgd.methods.adacomm import adacomm
from hpcsgd.methods.async_sgd import async_sgd
from hpcsgd.methods.bsp import bsp
from hpcsgd.methods.d_psgd import d_psgd
from hpcsgd.methods.diloco import diloco
from hpcsgd.methods.ensemble import ensemble
from hpcsgd.methods.fedavg import fedavg
from hpcsgd.methods.hierarchical import allreduce_local_sgd, hierarchical
from hpcsgd.methods.post_local import post_local
from hpcsgd.methods.sasgd import sasgd
from hpcsgd.methods.selsync import gradients, parameters, selsync
from hpcsgd.methods.sgp import osgp, sgp
from hpcsgd.methods.ssp import ssp
from hpcsgd.methods.switch import switch
from hpcsgd.sparsifiers import CLTk, Deft, HardThreshold, SIDCo, TopK

METHODS: Mapping[str, Callable[..., Method]] = {
    "ad_psgd": ad_psgd,
    "adacomm": adacomm,
    "allreduce_local_sgd": allreduce_local_sgd,
    "async_sgd": async_sgd,
    "bsp": bsp,
    "d_psgd": d_psgd,
    "diloco": diloco,
    "ensemble": ensemble,
    "fedavg": fedavg,
    "hierarchical": hierarchical,
    "osgp": osgp,
    "post_local": post_local,
    "sasgd": sasgd,
    "selsync": selsync,
    "sgp": sgp,
    "ssp": ssp,
    "switch": switch,
}

PARTS: Mapping[str, Mapping[str, Any]] = {
    "aggregate": {"parameters": parameters, "gradients": gradients},
    "combine": {"everyones": everyones, "own": own},
    "exchange": {"alltoall": AllToAll(), "reduce_scatter": ReduceScatter()},
    "feedback": {"error_feedback": ErrorFeedback(), "rate_inside": RateInside()},
    "graph": {
        "bipartite_exponential": BipartiteExponential(),
        "complete": Complete(),
        "exponential": Exponential(),
        "ring": Ring(),
        "undirected_exponential": UndirectedExponential(),
    },
    "indices": {"gaps": Gaps(), "plain": Plain()},
    "moments": {"kept": kept, "averaged": Averaged, "reset": Reset},
}
"""What the arguments of that name are called in a job file."""

MADE: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "exchange": {"sparse": Sparse},
    "feedback": {"momentum_correction": MomentumCorrection},
    "graph": {"powers_of_two": PowersOfTwo},
    "sparsifier": {
        "clt_k": CLTk,
        "deft": Deft,
        "hard_threshold": HardThreshold,
        "sidco": SIDCo,
        "topk": TopK,
    },
}
"""Those that have arguments themselves: tables with a `name` and the arguments."""

__all__ = [
    "METHODS",
    "PARTS",
    "Method",
    "ad_psgd",
    "adacomm",
    "allreduce_local_sgd",
    "async_sgd",
    "bsp",
    "d_psgd",
    "diloco",
    "ensemble",
    "fedavg",
    "hierarchical",
    "osgp",
    "post_local",
    "sasgd",
    "selsync",
    "sgp",
    "ssp",
    "switch",
]
