"""Which elements of a gradient are sent: one file per paper."""

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
"""As job files call them."""

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
