"""From a job file's names to the objects of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Generator, Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hpcsgd import models
from hpcsgd.config.reference import build, call, call_named, resolve, takes
from hpcsgd.config.schema import Config
from hpcsgd.core.generators import seed_generators
from hpcsgd.core.topology import Job
from hpcsgd.data import Batches, Injected, InjectedBatches, Sampler, Split, crop_and_flip
from hpcsgd.engine.lr import WarmUp, lr_scale
from hpcsgd.engine.optimizer import DistributedOptimizer
from hpcsgd.errors import UserError, located, near_miss
from hpcsgd.methods import MADE, METHODS, PARTS, Method
from hpcsgd.natural_gradient import NaturalGradient
from hpcsgd.training.loading import dealing, make_loader, opened
from hpcsgd.training.tasks import Task, task_of
from hpcsgd.training.trial import require_model_fits

Transform = Callable[[Tensor, Generator], Tensor]
TRANSFORMS: Mapping[str, Transform] = {"crop_and_flip": crop_and_flip}


@dataclass
class Assembly:
    """Everything that trains, ready to go."""

    model: nn.Module
    task: Task
    optimizer: DistributedOptimizer
    warm_up: WarmUp
    scheduler: LRScheduler | None
    sampler: Sampler
    batches: Batches | InjectedBatches
    """What is left of the epoch of `sampler`."""
    loader: DataLoader[Any]
    injected: Injected | None
    """What completes the batches of `loader`, where groups share samples."""
    transform: Transform
    generator: Generator
    """This rank's chance in `vary`."""
    train: Split
    test: Split
    steps_per_epoch: int
    natural_gradient: NaturalGradient | None
    """Around `optimizer`; its hooks do everything, so that nobody has to step it."""

    def vary(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What to train on in place of these samples: transformed, and as the data has it."""
        return self.train.vary(self.transform(x, self.generator), y, self.generator)


def assemble(config: Config, job: Job, source: str) -> Assembly:
    """Build what `config`, read from the file `source`, names on this rank of `job`; collective.

    Raises `JobError` naming file and key.
    """
    with job.together("preparing the run"), located(source):
        train, test = opened(config.data, "train"), opened(config.data, "test")
        task = task_of(train)
        dealt = dealing(job)
        sampler = dealt.sampler(train, config)
        batches = dealt.batches(sampler, config.data)
        transform = make_transform(config.data.transform)
        seed_generators(config.seed)  # all ranks build the same model, and rank 0's is the one that counts
        model = models.build(config.model.build, config.model.arguments)
        require_model_fits(model, train, task, config.model.build)
        inner = make_optimizer(config, model, job.groups)
        steps_per_epoch = len(batches)
        method = make_method(config, steps_per_epoch)
    own = config.seed + 1 + number_of(job)
    seed_generators(own)  # from here on chance (dropout) differs between ranks
    optimizer = DistributedOptimizer(inner, model, job, method)
    with job.together("preparing the run"), located(source):
        start = 1 / lr_scale(config.schedule.scaling, job.groups)
        warm_up = WarmUp(optimizer, round(config.schedule.warmup_epochs * steps_per_epoch), start)
        scheduler = make_scheduler(config, optimizer)
        natural_gradient = make_natural_gradient(config, optimizer, model)
    loader = make_loader(train, batches, config.data.workers)
    return Assembly(
        model=model,
        task=task,
        optimizer=optimizer,
        warm_up=warm_up,
        scheduler=scheduler,
        sampler=sampler,
        batches=batches,
        loader=loader,
        injected=Injected(loader, job) if isinstance(batches, InjectedBatches) else None,
        transform=transform,
        generator=Generator().manual_seed(own),
        train=train,
        test=test,
        steps_per_epoch=steps_per_epoch,
        natural_gradient=natural_gradient,
    )


def number_of(job: Job) -> int:
    """This rank's among all that train together; with islands of unlike sizes some share one."""
    return job.peers.number * job.size + job.rank


def make_optimizer(config: Config, model: nn.Module, P: int) -> optim.Optimizer:
    name, arguments = config.optimizer.build, config.optimizer.arguments
    if "lr" in arguments:
        raise UserError("[optimizer.arguments]: lr = ...: give it as lr of [optimizer], for one group")
    lr = config.optimizer.lr * lr_scale(config.schedule.scaling, P)
    table = _subclasses(optim, optim.Optimizer)
    return build("optimizer", name, table, {"lr": lr, **arguments}, optim.Optimizer, model.parameters())


def make_natural_gradient(
    config: Config, optimizer: optim.Optimizer, model: nn.Module
) -> NaturalGradient | None:
    arguments = config.optimizer.natural_gradient
    if arguments is None:
        return None
    with located("[optimizer] natural_gradient"):
        return call(NaturalGradient, arguments, optimizer, model)


def make_scheduler(config: Config, optimizer: optim.Optimizer) -> LRScheduler | None:
    schedule = config.schedule
    if schedule.build is None:
        return None
    table = _subclasses(optim.lr_scheduler, LRScheduler)
    made = build("schedule", schedule.build, table, schedule.arguments, LRScheduler, optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise UserError(
            "[schedule] build: ReduceLROnPlateau goes by results; allowed are schedulers that go by "
            "the number of steps or epochs alone"
        )
    return made


def make_method(config: Config, steps_per_epoch: int) -> Method:
    table = {"name": config.method.name, **config.method.arguments}
    return _method(table, steps_per_epoch, "[method]")


def _method(table: Mapping[str, Any], steps_per_epoch: int, place: str) -> Method:
    with located(f"{place} name"):
        factory = resolve(table["name"], METHODS)
    arguments = {key: value for key, value in table.items() if key != "name"}
    for key, value in arguments.items():
        if key in PARTS or key in MADE:
            arguments[key] = _part(key, value, place)
        elif isinstance(value, dict) and "name" in value:
            arguments[key] = _method(value, steps_per_epoch, f"{place} {key}")
        elif isinstance(value, dict) and "build" in value:
            arguments[key] = _optimizer_maker(value, key, place)
        elif isinstance(value, dict) and type(value.get("epoch")) is int:
            arguments[key] = value["epoch"] * steps_per_epoch
    if takes(factory, "steps_per_epoch"):
        arguments.setdefault("steps_per_epoch", steps_per_epoch)
    with located(place):
        return call_named(table["name"], factory, METHODS, arguments)


def _optimizer_maker(table: Mapping[str, Any], key: str, place: str) -> Callable[[Any], optim.Optimizer]:
    """Of parameters, for methods with an optimizer of their own."""
    name, optimizers = table["build"], _subclasses(optim, optim.Optimizer)
    with located(f"{place} {key} build"):
        factory = resolve(name, optimizers)
    arguments = {argument: value for argument, value in table.items() if argument != "build"}

    def make(parameters: Any) -> optim.Optimizer:
        with located(key):
            return call_named(name, factory, optimizers, arguments, parameters)

    return make


def _part(key: str, value: Any, place: str) -> Any:
    """What `value` calls: a name, or a table of a name and arguments, which may be parts again."""
    given, made = PARTS.get(key, {}), MADE.get(key, {})
    name, arguments = value, {}
    if isinstance(value, dict) and "name" in value:
        name, arguments = value["name"], {k: v for k, v in value.items() if k != "name"}
    with located(place):
        if not isinstance(name, str) or name not in {**given, **made}:
            raise UserError(f"{key} = {name!r}: {near_miss(str(name), {**given, **made})}")
        if name in given and arguments:
            raise UserError(f"{key} = {name!r} has no arguments, but {', '.join(arguments)} were given")
    if name in given:
        return given[name]
    place = f"{place} {key}"
    parts = {k: _part(k, v, place) if k in PARTS or k in MADE else v for k, v in arguments.items()}
    with located(place):
        return call_named(name, made[name], made, parts)


def _subclasses(module: Any, base: type) -> dict[str, type]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    public = {name: cls for name, cls in found.items() if not name.startswith("_")}
    return {name: cls for name, cls in public.items() if issubclass(cls, base) and cls is not base}


def make_transform(name: str | None) -> Transform:
    if name is None:
        return _unchanged
    with located("[data] transform"):
        return resolve(name, TRANSFORMS)


def _unchanged(x: Tensor, _: Generator) -> Tensor:
    return x
