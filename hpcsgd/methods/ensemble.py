"""EnsembleSync: groups that may die and return train alone, and meet every T steps with those that are alive.

EnsembleSync (text in our references), section 3.1:

    1  pull W                                   who starts or returns takes it from the first meeting
    2  T steps of local SGD                     a group shares each batch among its K_i ranks
    3  send W_i                                 ring over those in the register, no server
    4  W ← (1/M) Σ_i W_i over the living

Differences from the paper: no parameter server holds W, so the death of any group, and that of the
coordinator, is survived; a round's result is taken by all or by none; groups are of several ranks; they meet
at the end of an epoch, too, where samples are dealt anew.
"""

from __future__ import annotations

from hpcsgd.averagers import Ensemble
from hpcsgd.core.step import Exchange, Method
from hpcsgd.exchanges import AllToAll
from hpcsgd.schedules import Every


def ensemble(every: int, exchange: Exchange = AllToAll()) -> Method:  # noqa: B008 - frozen
    """Groups that are alive average their models after every `every` steps (T).

    Each group is a job of its own, an island: `hpcsgd launch` starts and restarts them. Moments are kept.
    """
    return Method(exchange=exchange, when=Every(every), how=Ensemble())
