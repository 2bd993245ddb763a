"""The table of methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpcsgd.core.method import Method
from hpcsgd.methods.ad_psgd import ad_psgd
from hpcsgd.methods.adacomm import adacomm
from hpcsgd.methods.async_sgd import async_sgd
from hpcsgd.methods.bsp import bsp
from hpcsgd.methods.d_psgd import d_psgd
from hpcsgd.methods.delayed import delayed
from hpcsgd.methods.des_loco import des_loco
from hpcsgd.methods.diloco import diloco
from hpcsgd.methods.ensemble import ensemble
from hpcsgd.methods.fedavg import fedavg
from hpcsgd.methods.hierarchical import allreduce_local_sgd, hierarchical
from hpcsgd.methods.no_loco import no_loco
from hpcsgd.methods.post_local import post_local
from hpcsgd.methods.sasgd import sasgd
from hpcsgd.methods.selsync import selsync
from hpcsgd.methods.sgp import osgp, sgp
from hpcsgd.methods.sparse_loco import sparse_loco
from hpcsgd.methods.ssp import ssp
from hpcsgd.methods.streamed import streamed
from hpcsgd.methods.switch import switch

METHODS: Mapping[str, Callable[..., Method]] = {
    "ad_psgd": ad_psgd,
    "adacomm": adacomm,
    "allreduce_local_sgd": allreduce_local_sgd,
    "async_sgd": async_sgd,
    "bsp": bsp,
    "d_psgd": d_psgd,
    "delayed": delayed,
    "des_loco": des_loco,
    "diloco": diloco,
    "ensemble": ensemble,
    "fedavg": fedavg,
    "hierarchical": hierarchical,
    "no_loco": no_loco,
    "osgp": osgp,
    "post_local": post_local,
    "sasgd": sasgd,
    "selsync": selsync,
    "sgp": sgp,
    "sparse_loco": sparse_loco,
    "ssp": ssp,
    "streamed": streamed,
    "switch": switch,
}

__all__ = [
    "METHODS",
    "Method",
    "ad_psgd",
    "adacomm",
    "allreduce_local_sgd",
    "async_sgd",
    "bsp",
    "d_psgd",
    "delayed",
    "des_loco",
    "diloco",
    "ensemble",
    "fedavg",
    "hierarchical",
    "no_loco",
    "osgp",
    "post_local",
    "sasgd",
    "selsync",
    "sgp",
    "sparse_loco",
    "ssp",
    "streamed",
    "switch",
]
