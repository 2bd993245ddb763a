"""EnsembleSync: groups that may die and return train alone, and those alive average every T steps.

M. Xie, M. Yasunaga: EnsembleSync (manuscript), section 3.1, with M living groups. W_i is the model of group
i, and W the model that the groups share. The right column says what hpcsgd does:

    1  get W                                    at a group's first synchronization
    2  train with T steps of local SGD          a group divides each batch among its K_i ranks
    3  send W_i                                 in a ring over the groups in the membership, without a server
    4  W ← (1/M) Σ_i W_i over living groups

Differences from the paper:

- No parameter server holds W. So training survives the death of any group, and of the coordinator.
- Either all groups take the result of a synchronization or none does.
- A group has several ranks.
- The groups also average at the end of an epoch, when samples are assigned anew.
- With `guard`, groups whose changes are outliers have no part in W.
- With `outer`, W is the step of an outer optimizer on the last W, as in DiLoCo; the mean gives its gradient.
- With `merge`, that gradient is the radial-directional average of the changes, as in Decoupled DiLoCo.
- With `quorum`, groups do not wait for all others, as in Decoupled DiLoCo (arXiv:2604.21428, section 3.2):
  once `quorum` groups have arrived, the others have `grace_s` seconds. What a late group learned is dropped.
- With `late_rounds` it counts in the synchronization in which the group returns. Decoupled DiLoCo drops it.
- With `tokens_per_step`, groups are weighted in that mean by their steps and tokens, as in Decoupled DiLoCo.
- With `num_fragments`, a synchronization has one fragment of the model, as in Streaming DiLoCo
  (arXiv:2501.18512). Groups wait for the result.
"""

from __future__ import annotations

import math

from hpcsgd.arguments import checked
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.core.waits import Quorum
from hpcsgd.errors import UserError
from hpcsgd.methods.registry import method
from hpcsgd.parts.averagers import (
    ElasticMean,
    GuardedElasticMean,
    MakeOptimizer,
    MeanFrom,
    OuterElasticFragments,
    OuterElasticMean,
    PseudoGradientPenalty,
    RadialDirectional,
    RadialDirectionalElasticMean,
    require_alone,
)
from hpcsgd.parts.grad_reduces import Dense
from hpcsgd.parts.outer_schedules.base import OuterSchedule, require_useful
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.schedules.every import InTurn

PAPER = """
@misc{xie_ensemblesync,
  title = {{EnsembleSync}: Reliable Distributed {SGD} with Less Communication},
  author = {Xie, Michael and Yasunaga, Michihiro},
  howpublished = {Manuscript},
}
"""


@method(cite=PAPER)
@checked
def ensemble_sync(
    sync_every: int,
    grad_reduce: GradReduce = Dense(),  # noqa: B008 - frozen
    guard: PseudoGradientPenalty | None = None,
    outer: MakeOptimizer | None = None,
    outer_schedule: OuterSchedule | None = None,
    quorum: int | None = None,
    grace_s: float | None = None,
    late_rounds: int = 0,
    merge: RadialDirectional | None = None,
    num_fragments: int = 1,
    tokens_per_step: float | None = None,
) -> Method:
    """Return local SGD of groups that may die: those alive average their models every `sync_every` steps.

    Each replica group is a job of its own; `hpcsgd launch` starts and restarts them. Every group keeps its
    own momentum.

    Args:
        sync_every: Steps between two synchronizations (the paper's T), at least 1. A group that dies loses
            what it learned since the last one. Small values lose less and send more.
        grad_reduce: How the gradients of a group are averaged in every step: `Dense()`, `AllToAll()`,
            `ReduceScatter()` or `Sparse(...)`. Default Dense().
        guard: What protects the mean from groups whose changes are outliers: `PseudoGradientPenalty()`,
            without `max_norm`. Each group keeps its own history of norms; one that returns starts a new one.
            Default None: the plain mean.
        outer: Function that makes an outer optimizer from a list of tensors, as for `diloco`: an SGD or an
            Adam. A group that returns gets its state from the others. In a job file: ``outer = { name =
            "SGD", lr = 0.7, momentum = 0.9, nesterov = true }``. Default None: all groups take the mean.
        outer_schedule: Rate and momentum of the outer optimizer over the run, such as
            `outer_schedules.muloco()`, for the groups that are alive. Default None: those of `outer`.
        quorum: Number of groups that are enough for a synchronization, at least 1. A group that is still
            missing `grace_s` seconds later is left out of it, and gets the others' model when it is back.
            Default None: groups wait for all that are alive.
        grace_s: Seconds, more than 0, for which a synchronization waits for more groups than `quorum`.
            Default None: only without `quorum`.
        late_rounds: Number of synchronizations that a late group may miss for its work to still count. The
            synchronization in which it returns then includes its change, from the model from which it
            trained. If it missed more, or its processes have ended, the change is lost. Default 0: it is
            always lost. Usually a late group misses two. A group that was left out for another reason, such
            as a broken connection, is treated alike if its processes go on. More than 0 needs `outer`, since
            only then a group that returns gets the others' model after the last synchronization; SGD with a
            rate of 1 is the plain mean.
        merge: How the groups' changes become the gradient of `outer`, if not by their mean:
            `RadialDirectional()`, without `guard`. Default None: the mean.
        num_fragments: Number of fragments F of the model, 1 to `sync_every`, of about the same size. After
            every `sync_every`/F steps the groups synchronize one of them, in turn; each has its own θ and
            outer optimizer. The start, the end of an epoch, a checkpoint and a stop synchronize all. A late
            group loses what it learned in the fragments that it missed, and keeps the rest if it still has
            samples. With `late_rounds` all of it may still count. More than 1 needs `outer`, without
            `guard`. Default 1: the whole model.
        tokens_per_step: Number of tokens, or samples, from which this group learns in a step, above 0; their
            mean if steps differ. The groups then have weights in the mean of which `outer` takes its
            gradient: B²·c for c steps of B tokens. The steps are those that a group has made since it last
            received the model, or the fragment; without any, its weight is 0. Groups of `hpcsgd launch` have
            the same B, so they weigh as their steps, of which a late or returning group may have fewer. With
            `guard`, the weights of both are multiplied. Needs `outer`. Default None: all groups weigh alike,
            as in EnsembleSync.

    Returns:
        A `Method` for `DistributedOptimizer`. Use one instance per optimizer: it may hold state.

    Raises:
        UserError: If `sync_every` or `quorum` is below 1, one of `quorum` and `grace_s` is missing,
            `late_rounds` is below 0 or has no `quorum` or no `outer`, `guard` has a `max_norm`, `outer` does
            not make a torch optimizer whose state other groups can get, `outer_schedule`, `merge` or
            `tokens_per_step` has no `outer`, `tokens_per_step` is not a number above 0, `merge` is combined
            with `guard`, `num_fragments` is not from 1 to `sync_every`, or is above 1 without `outer` or with
            `guard`, or `outer_schedule` has a rate of 0 at the first synchronization; when the optimizer is
            wrapped, if the job is not a replica group; at the first step, if `num_fragments` is above the
            number of trainable tensors.
        JobError: At a synchronization, if replica groups have different models, or were given different
            arguments other than `sync_every`, `grad_reduce` and the value of `tokens_per_step`. If only a
            group that returns differs, it alone ends.

    Shape:
        M parameters in total; P' groups are alive, and the largest of them has C ranks. At a synchronization
        a rank sends 2·(P'−1)/P'·M/C elements for each shard that it owns; with `num_fragments` F about 1/F of
        them. With `guard` or `outer` it sends about 16·(F+2)·P' bytes more for each of them, with
        `tokens_per_step` another 16·F·P'. With `guard` it keeps θ, the model after the last synchronization:
        M elements. With `merge` it sends 8 bytes more for each tensor of the model, and 16-bit parameters in
        float32. With `outer` it keeps θ and each state tensor of the outer optimizer, M elements each. When a
        group joins or returns, it also sends these once, like the model.

    Note:
        After a synchronization, `optimizer.metrics["distance"]` is the distance of this group's model from
        the mean, before the outer step. With `num_fragments`, each fragment counts as of its last
        synchronization in this run, and 0 before it. With `outer_schedule`, "outer_lr" and "outer_momentum"
        are the values of that step. With `guard`, a group that is left out reports that of the model from
        which it began.

        A late group keeps its optimizer state. Its float buffers count as they are, and `guard` compares its
        change with its own history. Checkpoints never hold late work.

    Example:
        >>> method = hpcsgd.ensemble_sync(sync_every=50)
        >>> hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
        Traceback (most recent call last):
        hpcsgd.errors.JobError: method ensemble_sync is for groups that are jobs of their own: ...

    References:
        M. Xie, M. Yasunaga: EnsembleSync: Reliable Distributed SGD with Less Communication, section 3.1.

    See Also:
        `hierarchical`, `diloco`: their groups belong to one job, which ends if one of them dies.
    """
    every, enough = Every(sync_every), _quorum(quorum, grace_s, late_rounds, outer)
    _require_fragments(num_fragments, sync_every, guard)
    if outer is None:
        fragments = None if num_fragments == 1 else num_fragments
        _require_no_outer(
            outer_schedule=outer_schedule, merge=merge, num_fragments=fragments,
            tokens_per_step=tokens_per_step,
        )  # fmt: skip
        mean = ElasticMean(enough) if guard is None else GuardedElasticMean(guard, enough)
        return Method(grad_reduce, every, mean)
    _require_above_0(tokens_per_step)
    if outer_schedule is not None:
        require_useful(outer_schedule, sync_every, num_fragments=num_fragments)
    if num_fragments == 1:
        how = OuterElasticMean(_mean(guard, merge, enough), outer, outer_schedule, tokens_per_step)
        return Method(grad_reduce, every, how)
    turn = InTurn(sync_every, num_fragments)
    inner = MeanFrom(enough) if merge is None else RadialDirectionalElasticMean(merge, enough)
    how = OuterElasticFragments(inner, outer, outer_schedule, turn, tokens_per_step)
    return Method(grad_reduce, turn, how)


def _quorum(
    groups: int | None, grace_s: float | None, late_rounds: int, outer: MakeOptimizer | None
) -> Quorum | None:
    _require_use(late_rounds, groups, outer)
    if groups is None and grace_s is None:
        return None
    if groups is None or grace_s is None:
        given, missing = ("quorum", "grace_s") if grace_s is None else ("grace_s", "quorum")
        raise UserError(f"{given}: it needs {missing} as well", key=given)
    if groups < 1:
        raise UserError(f"quorum = {groups}: expected at least 1", key="quorum", value=groups)
    if not grace_s > 0:
        raise UserError(f"grace_s = {grace_s:g}: expected more than 0", key="grace_s", value=grace_s)
    return Quorum(groups, grace_s, late_rounds)


def _require_use(late_rounds: int, quorum: int | None, outer: MakeOptimizer | None) -> None:
    """Raise `UserError` if late groups cannot be counted so many rounds later."""
    if late_rounds < 0:
        fault = f"late_rounds = {late_rounds}: expected at least 0"
    elif late_rounds and quorum is None:
        fault = "late_rounds: it needs quorum and grace_s as well"
    elif late_rounds and outer is None:
        fault = (
            "late_rounds: it needs outer as well; the outer optimizer SGD with lr = 1 leaves groups with the "
            "plain mean"
        )
    else:
        return
    raise UserError(fault, key="late_rounds", value=late_rounds)


def _require_fragments(num_fragments: int, sync_every: int, guard: PseudoGradientPenalty | None) -> None:
    """Raise `UserError` if the model cannot be synchronized in so many fragments."""
    if not 1 <= num_fragments <= sync_every:
        fault = (
            f"num_fragments = {num_fragments}: expected 1 to {sync_every}, the steps between synchronizations"
        )
        raise UserError(fault, key="num_fragments", value=num_fragments)
    if num_fragments > 1 and guard is not None:
        raise UserError(
            "guard: it cannot be combined with num_fragments: leave one of the two out", key="guard"
        )


def _require_above_0(tokens_per_step: float | None) -> None:
    if tokens_per_step is not None and not 0 < tokens_per_step < math.inf:
        fault = f"tokens_per_step = {tokens_per_step:g}: expected a number above 0"
        raise UserError(fault, key="tokens_per_step", value=tokens_per_step)


def _require_no_outer(**given: object) -> None:
    """Raise `UserError` if one of these arguments is given, all of which need an outer optimizer."""
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name}: it needs an outer optimizer: pass outer as well", key=name)


def _mean(
    guard: PseudoGradientPenalty | None, merge: RadialDirectional | None, quorum: Quorum | None
) -> MeanFrom | GuardedElasticMean | RadialDirectionalElasticMean:
    """Return the average for an outer optimizer that these arguments of `ensemble_sync` describe."""
    if merge is not None:
        require_alone(guard=guard)
        return RadialDirectionalElasticMean(merge, quorum)
    return MeanFrom(quorum) if guard is None else GuardedElasticMean(guard, quorum)
