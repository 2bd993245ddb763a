"""Sparsifiers select the elements of a gradient that are sent. One file per paper."""

from collections.abc import Callable, Mapping

from hpcsgd.parts.sparsifiers.base import Accumulated, Share, Sparsifier
from hpcsgd.parts.sparsifiers.clt_k import CLTk
from hpcsgd.parts.sparsifiers.deft import Deft
from hpcsgd.parts.sparsifiers.hard_threshold import HardThreshold
from hpcsgd.parts.sparsifiers.sidco import SIDCo
from hpcsgd.parts.sparsifiers.topk import TopK

SPARSIFIERS: Mapping[str, Callable[..., Sparsifier]] = {
    "clt_k": CLTk,
    "deft": Deft,
    "hard_threshold": HardThreshold,
    "sidco": SIDCo,
    "topk": TopK,
}
"""The sparsifiers, by their names in job files."""

__all__ = [
    "SPARSIFIERS",
    "Accumulated",
    "CLTk",
    "Deft",
    "HardThreshold",
    "SIDCo",
    "Share",
    "Sparsifier",
    "TopK",
]
