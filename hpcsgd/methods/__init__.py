"""All methods of training. To add a method, import it here; that also makes it public.

`hpcsgd/__init__.pyi` exports all names that this file imports with `as`.
"""

from hpcsgd.core.method import Method as Method
from hpcsgd.methods.ad_psgd import ad_psgd as ad_psgd
from hpcsgd.methods.adacomm import adacomm as adacomm
from hpcsgd.methods.async_diloco import async_diloco as async_diloco
from hpcsgd.methods.async_sgd import async_sgd as async_sgd
from hpcsgd.methods.bsp import bsp as bsp
from hpcsgd.methods.d_psgd import d_psgd as d_psgd
from hpcsgd.methods.delayed import delayed as delayed
from hpcsgd.methods.des_loc import des_loc as des_loc
from hpcsgd.methods.diloco import diloco as diloco
from hpcsgd.methods.ensemble_sync import ensemble_sync as ensemble_sync
from hpcsgd.methods.fedavg import fedavg as fedavg
from hpcsgd.methods.heloco import heloco as heloco
from hpcsgd.methods.hierarchical import allreduce_local_sgd as allreduce_local_sgd
from hpcsgd.methods.hierarchical import hierarchical as hierarchical
from hpcsgd.methods.noloco import noloco as noloco
from hpcsgd.methods.pier import pier as pier
from hpcsgd.methods.post_local import post_local as post_local
from hpcsgd.methods.registry import METHODS  # noqa: F401  # pyright: ignore[reportUnusedImport]
from hpcsgd.methods.sasgd import sasgd as sasgd
from hpcsgd.methods.selsync import selsync as selsync
from hpcsgd.methods.sgp import osgp as osgp
from hpcsgd.methods.sgp import sgp as sgp
from hpcsgd.methods.sparseloco import sparseloco as sparseloco
from hpcsgd.methods.ssp import ssp as ssp
from hpcsgd.methods.streaming import streaming as streaming
from hpcsgd.methods.switch import switch as switch
