"""The only list of the public names of hpcsgd: type checkers read it, and `__init__.py` imports by it."""

from hpcsgd.checkpoint.in_scripts import load as load
from hpcsgd.checkpoint.in_scripts import save as save
from hpcsgd.core import graphs as graphs
from hpcsgd.core.collectives import allreduce as allreduce
from hpcsgd.core.collectives import barrier as barrier
from hpcsgd.core.collectives import broadcast as broadcast
from hpcsgd.core.topology import Topology as Topology
from hpcsgd.data import ByLabel as ByLabel
from hpcsgd.data import DefDP as DefDP
from hpcsgd.data import Dirichlet as Dirichlet
from hpcsgd.data import Injected as Injected
from hpcsgd.data import InjectedBatches as InjectedBatches
from hpcsgd.data import Injection as Injection
from hpcsgd.data import Loader as Loader
from hpcsgd.data import Overlapping as Overlapping
from hpcsgd.data import Sampler as Sampler
from hpcsgd.data import SelDP as SelDP
from hpcsgd.data import equal_batches as equal_batches
from hpcsgd.engine.chained import ChainedOptimizer as ChainedOptimizer
from hpcsgd.engine.lr import WarmUp as WarmUp
from hpcsgd.engine.lr import lr_scale as lr_scale
from hpcsgd.engine.muon import muon as muon
from hpcsgd.engine.natural_gradient import NaturalGradient as NaturalGradient
from hpcsgd.engine.optimizer import DistributedOptimizer as DistributedOptimizer
from hpcsgd.engine.scaling import GradScaler as GradScaler
from hpcsgd.errors import JobError as JobError
from hpcsgd.errors import UserError as UserError
from hpcsgd.methods import *  # noqa: F403 - a method's one import stands there
from hpcsgd.models.sharded import fully_shard as fully_shard
from hpcsgd.models.sync_batch_norm import sync_batch_norm as sync_batch_norm
from hpcsgd.parts import outer_schedules as outer_schedules
from hpcsgd.parts import quantizers as quantizers
from hpcsgd.parts.averagers import AcrossShards as AcrossShards
from hpcsgd.parts.averagers import AverageState as AverageState
from hpcsgd.parts.averagers import PerBlock as PerBlock
from hpcsgd.parts.averagers import PseudoGradientPenalty as PseudoGradientPenalty
from hpcsgd.parts.averagers import ResetState as ResetState
from hpcsgd.parts.averagers import keep_state as keep_state
from hpcsgd.parts.grad_reduces import AllToAll as AllToAll
from hpcsgd.parts.grad_reduces import Dense as Dense
from hpcsgd.parts.grad_reduces import LrInErrorFeedback as LrInErrorFeedback
from hpcsgd.parts.grad_reduces import MomentumCorrection as MomentumCorrection
from hpcsgd.parts.grad_reduces import Quantized as Quantized
from hpcsgd.parts.grad_reduces import ReduceScatter as ReduceScatter
from hpcsgd.parts.grad_reduces import Sparse as Sparse
from hpcsgd.parts.schedules import DynamicLocalSteps as DynamicLocalSteps
from hpcsgd.parts.sparsifiers import CLTk as CLTk
from hpcsgd.parts.sparsifiers import Deft as Deft
from hpcsgd.parts.sparsifiers import HardThreshold as HardThreshold
from hpcsgd.parts.sparsifiers import SIDCo as SIDCo
from hpcsgd.parts.sparsifiers import TopK as TopK
from hpcsgd.performance.probing.own import probe as probe
from hpcsgd.start import init as init

__all__: list[str]
