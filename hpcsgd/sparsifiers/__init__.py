"""Which elements of a gradient are sent: one paper, one file."""

from hpcsgd.sparsifiers.base import Accumulated, Share, Sparsifier
from hpcsgd.sparsifiers.clt_k import CLTk
from hpcsgd.sparsifiers.deft import Deft
from hpcsgd.sparsifiers.hard_threshold import HardThreshold
from hpcsgd.sparsifiers.sidco import SIDCo
from hpcsgd.sparsifiers.topk import TopK

__all__ = ["Accumulated", "CLTk", "Deft", "HardThreshold", "SIDCo", "Share", "Sparsifier", "TopK"]
