"""Sparsifiers select the elements of a gradient that are sent. One file per paper."""

from collections.abc import Callable, Mapping

from hpcsgd.parts.sparsifiers.base import Accumulated, Adapting, Share, Sparsifier
from hpcsgd.parts.sparsifiers.clt_k import CLTk
from hpcsgd.parts.sparsifiers.deft import Deft
from hpcsgd.parts.sparsifiers.exdyna import ExDyna
from hpcsgd.parts.sparsifiers.hard_threshold import HardThreshold
from hpcsgd.parts.sparsifiers.micro import MiCRO
from hpcsgd.parts.sparsifiers.sidco import SIDCo
from hpcsgd.parts.sparsifiers.topk import TopK

SPARSIFIERS: Mapping[str, Callable[..., Sparsifier]] = {
    "clt_k": CLTk,
    "deft": Deft,
    "exdyna": ExDyna,
    "hard_threshold": HardThreshold,
    "micro": MiCRO,
    "sidco": SIDCo,
    "topk": TopK,
}
"""The sparsifiers, by their names in job files."""

__all__ = [
    "SPARSIFIERS",
    "Accumulated",
    "Adapting",
    "CLTk",
    "Deft",
    "ExDyna",
    "HardThreshold",
    "MiCRO",
    "SIDCo",
    "Share",
    "Sparsifier",
    "TopK",
]
