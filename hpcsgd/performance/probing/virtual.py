"""Build the training of a job file for P virtual groups of K ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from hpcsgd.comm import Communicator
from hpcsgd.comm.streams import HOST
from hpcsgd.config.schema import Config, TrainingSection
from hpcsgd.core.generators import seed_generators
from hpcsgd.data import AsRank, Batches, Sampler, Split, varied
from hpcsgd.engine.lr import WarmUp, first_factor
from hpcsgd.engine.precision import Precision
from hpcsgd.models.sharded import give_values
from hpcsgd.performance.probing.idle import IN_MEMORY, Offload
from hpcsgd.performance.probing.own import HELD_OUT
from hpcsgd.performance.probing.replicas import Chance, Trainee, VirtualGroups, VirtualRank
from hpcsgd.performance.probing.virtual_ranks import virtual_rank
from hpcsgd.train.length import length
from hpcsgd.train.loading import batch_of_rank, opened
from hpcsgd.train.lr_schedule import make_scheduler
from hpcsgd.train.model_layout import lay_out
from hpcsgd.train.tasks import task_of
from hpcsgd.train.training_setup import (
    make_model,
    make_natural_gradient,
    make_optimizer,
    make_precision,
    make_transform,
)
from hpcsgd.train.trial import require_model_fits


def virtual_groups(
    config: Config,
    P: int,
    K: int,
    world: Communicator,
    *,
    warm_up_steps: int | None = None,
    idle: Offload = IN_MEMORY,
    device: torch.device = HOST,
) -> VirtualGroups:
    """Return P virtual groups of K ranks that train as `config` says, on the ranks of `world`. Collective.

    `warm_up_steps` replaces the configured warm-up. Raises `UserError` if `config` cannot be trained.
    """
    train = opened(config.data, "train")
    task = task_of(train)
    seed_generators(config.seed)
    model = make_model(config)
    give_values(model, model, config.seed)  # an FSDP model is built without values
    model.to(device)
    require_model_fits(model, train, task, config.model.name, device)
    lay_out(model, config.training, _precision(config.training, model))
    hosted = range(world.rank, P, world.size)
    trainees = [_trainee(config, train, copy.deepcopy(model), g, P, K, warm_up_steps) for g in hosted]
    test = opened(config.data, "test")
    shown = range(0, len(test), -(-len(test) // min(HELD_OUT, task.at_once)))
    x, y = test.collate(test.__getitems__(list(shown)))
    return VirtualGroups(trainees, P, world, task.loss, Chance.on(device), (x.to(device), y.to(device)), idle)


def _trainee(
    config: Config, train: Split, model: nn.Module, g: int, P: int, K: int, warm_up_steps: int | None
) -> Trainee:
    optimizer = make_optimizer(config, model, P)
    make_natural_gradient(config, optimizer, model)  # its estimates belong to the group, not to a member
    batch = batch_of_rank(config.data.group_batch_size, K)
    batches = Batches(Sampler(train, AsRank(g * K, P * K)), batch)
    steps_per_epoch = len(batches)
    rule = config.lr_schedule.scaling
    if warm_up_steps is None or rule == "none":
        warm_up_steps = round(config.lr_schedule.warmup_epochs * steps_per_epoch)
    WarmUp(optimizer, warm_up_steps, first_factor(rule, P, warm_up_steps))
    how_long = length(config.training, batches, P * K, task_of(train).tokens)
    scheduler = make_scheduler(config.lr_schedule, optimizer, how_long)
    every = 1 if config.lr_schedule.interval == "step" else steps_per_epoch
    t = 0

    def after_update() -> None:
        nonlocal t
        t += 1
        if scheduler is not None and t % every == 0:
            scheduler.step()

    device = next(model.parameters()).device
    members = [_virtual_rank(config, train, batch, g * K + j, P * K, device) for j in range(K)]
    return Trainee(model, optimizer, members, after_update, _precision(config.training, model))


def _precision(training: TrainingSection, model: nn.Module) -> Precision:
    made = make_precision(training, next(model.parameters()).device)
    assert made.master is None, "probe_config replaces bf16_master: plain optimizers have no master weights"
    return made


def _virtual_rank(
    config: Config, train: Split, batch: int, rank: int, size: int, device: torch.device
) -> VirtualRank:
    transform = make_transform(config.data.transform)
    generator = Generator("cpu").manual_seed(config.seed + 1 + rank)

    def load(rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = train.collate(train.__getitems__(rows))
        return varied(train, transform(x.to(device), generator), y.to(device), generator)

    return virtual_rank(train, load, batch, rank, size, config.seed, device)
