"""When groups wait for each other: a file a family, and the table of names, those of the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpcsgd.simulation.course import Rule
from hpcsgd.simulation.rules.ad_psgd import AdPsgd
from hpcsgd.simulation.rules.delayed import Delayed
from hpcsgd.simulation.rules.ensemble import Ensemble
from hpcsgd.simulation.rules.push import Push, d_psgd, osgp, sgp
from hpcsgd.simulation.rules.server import AsyncSgd, Ssp
from hpcsgd.simulation.rules.synchronous import Hierarchical, bsp

RULES: Mapping[str, Callable[..., Rule]] = {
    "ad_psgd": AdPsgd,
    "allreduce_local_sgd": Hierarchical,
    "async_sgd": AsyncSgd,
    "bsp": bsp,
    "d_psgd": d_psgd,
    "delayed": Delayed,
    "ensemble": Ensemble,
    "hierarchical": Hierarchical,
    "osgp": osgp,
    "sgp": sgp,
    "ssp": Ssp,
}
"""As job files and scenario files call them."""

__all__ = [
    "RULES",
    "AdPsgd",
    "AsyncSgd",
    "Delayed",
    "Ensemble",
    "Hierarchical",
    "Push",
    "Ssp",
    "bsp",
    "d_psgd",
    "osgp",
    "sgp",
]
