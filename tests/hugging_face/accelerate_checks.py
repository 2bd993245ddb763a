"""A program for 4 ranks: a loop written for Accelerate trains the same bits as a plain loop of hpcsgd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import hpcsgd
import hpcsgd.accelerate
from hpcsgd import DistributedOptimizer
from hpcsgd.accelerate.accelerator import taken_over
from hugging_face.models import BATCH, Tokens, digest, gpt2
from hugging_face.running import Scene, refusal, run_all, same

DATA = Tokens(9 * 4 * BATCH)
STEPS = 9
"""The steps of an epoch; the last synchronization is that of step 8."""
Change = Callable[[Any, Any, nn.Module], object]


def method() -> hpcsgd.Method:
    return hpcsgd.hierarchical(sync_every=4)


def accelerator(scene: Scene, **more: Any) -> hpcsgd.accelerate.Accelerator:
    return hpcsgd.accelerate.Accelerator(topology=scene.topology, method=method(), **more)


def prepared(scene: Scene, **more: Any) -> tuple[Any, Any, Any, Any]:
    """Return an accelerator, and the model, optimizer and loader that it has prepared."""
    ours = accelerator(scene, **more)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return ours, *ours.prepare(model, optimizer, DataLoader(DATA, BATCH))


def loop(
    ours: Any, model: nn.Module, optimizer: Any, loader: Any, *, clip: str = "norm", steps: int = 0
) -> None:
    """Train for one epoch, or for `steps` passes, as Accelerate's documentation shows it."""
    for number, batch in enumerate(loader, start=1):
        with ours.accumulate(model):
            ours.backward(model(**batch).loss)
            if ours.sync_gradients and clip == "norm":
                ours.clip_grad_norm_(model.parameters(), 0.5)
            if ours.sync_gradients and clip == "value":
                ours.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        if number == steps:
            break


def plain_loop(scene: Scene, *, clip: str = "norm", passes: int = 1, bf16: bool = False) -> nn.Module:
    topology, model = scene.topology, gpt2()
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer = DistributedOptimizer(inner, model, topology, method(), gradient_accumulation_steps=passes)
    batches = list(DataLoader(DATA, BATCH))[topology.rank :: topology.world_size]
    for i in range(0, len(batches), passes):
        for batch in batches[i : i + passes]:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch).loss
            (loss / passes).backward()
        if clip == "norm":
            optimizer.clip_grad_norm_(0.5)
        if clip == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


def the_bits_of_a_plain_loop(scene: Scene) -> None:
    found = {}
    for clip in ("norm", "value", "none"):
        ours, model, optimizer, loader = prepared(scene)
        loop(ours, model, optimizer, loader, clip=clip)
        assert type(model) is type(gpt2()), "there is no wrapper"
        (distributed,) = ours.distributed_optimizers
        assert optimizer.optimizer is distributed
        assert distributed.t == STEPS
        found[clip] = digest(model)
        assert found[clip] == digest(plain_loop(scene, clip=clip)), clip
        assert not same(found[clip], scene.topology)
    assert len(set(found.values())) == 3


def accumulation_with_a_rest(scene: Scene) -> None:
    ours, model, optimizer, loader = prepared(scene, gradient_accumulation_steps=2)
    loop(ours, model, optimizer, loader)
    assert ours.distributed_optimizers[0].t == 5
    assert digest(model) == digest(plain_loop(scene, passes=2))


def another_number_of_passes_later(scene: Scene) -> None:
    ours, model, optimizer, loader = prepared(scene)
    ours.gradient_accumulation_steps = 3
    assert ours.gradient_accumulation_steps == 3
    loop(ours, model, optimizer, loader)
    assert digest(model) == digest(plain_loop(scene, passes=3))


def bfloat16(scene: Scene) -> None:
    AcceleratorState._reset_state()  # the process keeps the precision with which it began
    ours, model, optimizer, loader = prepared(scene, mixed_precision="bf16")
    loop(ours, model, optimizer, loader)
    assert digest(model) == digest(plain_loop(scene, bf16=True))
    AcceleratorState._reset_state()


def float16(scene: Scene) -> None:
    """All ranks skip a step in which a gradient of one rank overflows.

    The check sets the scaler itself, because Accelerate makes one on GPUs only.
    """
    AcceleratorState._reset_state()
    settings = GradScalerKwargs(init_scale=1024.0)
    plain: Any = accelerate.Accelerator(mixed_precision="fp16", kwargs_handlers=[settings])
    plain.scaler, plain.native_amp = torch.amp.GradScaler("cpu"), True
    ours: Any = taken_over(plain)
    ours.train_with(scene.topology, method())
    assert type(ours.scaler) is hpcsgd.GradScaler
    model: Any = nn.Linear(8, 4)
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
    skipped = []
    for step in range(4):
        factor = math.inf if (step, scene.topology.rank) == (1, 2) else 1.0
        out = model(torch.full((4, 8), 0.1 * scene.topology.rank))
        ours.backward(out.square().mean() * factor)
        norm = ours.clip_grad_norm_(model.parameters(), 1.0)
        assert norm < 10 or step == 1, "the norm is that of the gradient without the scale"
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(ours.optimizer_step_was_skipped)
    assert skipped == [False, True, False, False]
    assert ours.scaler.get_scale() == 512
    assert ours.distributed_optimizers[0].t == 3
    AcceleratorState._reset_state()


def prepared_one_by_one(scene: Scene) -> None:
    ours = accelerator(scene)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model = ours.prepare(model)
    optimizer, loader = ours.prepare(optimizer, DataLoader(DATA, BATCH))
    assert ours.prepare(model, optimizer) == (model, optimizer)
    loop(ours, model, optimizer, loader)
    other = accelerator(scene)
    again = gpt2()
    optimizer = torch.optim.AdamW(again.parameters(), 1e-2)
    optimizer, again, loader = other.prepare(optimizer, again, DataLoader(DATA, BATCH))
    loop(other, again, optimizer, loader)
    assert digest(model) == digest(again) == digest(plain_loop(scene))


def two_models_and_schedulers(scene: Scene) -> None:
    ours = accelerator(scene, step_scheduler_with_optimizer=True)
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    schedulers = [StepLR(each, 1, gamma=0.5) for each in optimizers]
    first, second, a, b, c, d = ours.prepare(first, second, *optimizers, *schedulers)
    for _ in range(2):
        ours.backward(second(first(torch.ones(4, 3))).square().mean())
        norm = ours.clip_grad_norm_([*first.parameters(), *second.parameters()], 1e-3)
        assert norm > 1e-3
        squares = [p.grad.square().sum() for each in (first, second) for p in each.parameters()]
        assert abs(torch.stack(squares).sum().sqrt() - 1e-3) < 1e-6, "one norm over both"
        for each in (a, b, c, d):
            each.step()
        a.zero_grad()
        b.zero_grad()
    assert [each.t for each in ours.distributed_optimizers] == [2, 2]
    assert c.optimizers == [a]
    assert d.optimizers == [b]
    assert a.param_groups[0]["lr"] == 0.1 * 0.5 ** (2 * scene.topology.world_size)


def evaluation(scene: Scene) -> None:
    ours, model, optimizer, loader = prepared(scene)
    loop(ours, model, optimizer, loader)
    before = digest(model)
    held_out = ours.prepare(DataLoader(Tokens(30, 1), BATCH))
    with ours.averaged_model(), ours.averaged_model(), torch.no_grad():
        assert same(digest(model), scene.topology)
        firsts = [ours.gather_for_metrics(batch["input_ids"][:, 0]) for batch in held_out]
    assert torch.cat(firsts).tolist() == Tokens(30, 1).tokens[:, 0].tolist(), "each sample once, on all ranks"
    assert digest(model) == before


def the_saved_model_is_the_average(scene: Scene) -> None:
    ours, model, optimizer, loader = prepared(scene)
    loop(ours, model, optimizer, loader)
    state = ours.get_state_dict(model)
    ours.save_model(model, str(scene.folder))
    hpcsgd.barrier(scene.topology)
    saved = load_file(scene.folder / "model.safetensors")
    with ours.averaged_model():
        mean = {name: x.clone() for name, x in model.state_dict().items()}
    assert all(torch.equal(state[name], x) for name, x in mean.items())
    assert set(mean) - set(saved) == {"lm_head.weight"}, "tied weights are saved once"
    assert all(torch.equal(saved[name], mean[name]) for name in saved)
    assert not torch.equal(model.state_dict()["lm_head.weight"], mean["lm_head.weight"])


def a_checkpoint(scene: Scene) -> None:
    """A checkpoint has rank 0's model and what each rank has alone; it continues with the same bits."""
    ours, model, optimizer, loader = prepared(scene)
    loop(ours, model, optimizer, loader, steps=6)
    own = digest(model)
    ours.save_state(str(scene.folder))
    hpcsgd.barrier(scene.topology)
    assert digest(model) == own
    loop(ours, model, optimizer, ours.skip_first_batches(loader, 6))
    expected = digest(model)
    ours.load_state(str(scene.folder))
    assert digest(model) == own
    other, again, second, loader = prepared(scene)
    other.load_state(str(scene.folder))
    assert digest(again) == own
    assert other.distributed_optimizers[0].t == 6
    loop(other, again, second, other.skip_first_batches(loader, 6))
    assert digest(again) == expected == digest(plain_loop(scene))


def checkpoints_with_names_by_number(scene: Scene) -> None:
    settings = accelerate.utils.ProjectConfiguration(str(scene.folder), automatic_checkpoint_naming=True)
    ours, model, optimizer, loader = prepared(scene, project_config=settings)
    loop(ours, model, optimizer, loader, steps=2)
    ours.save_state()
    own = digest(model)
    loop(ours, model, optimizer, loader, steps=1)
    assert digest(model) != own
    hpcsgd.barrier(scene.topology)
    ours.load_state()
    assert digest(model) == own


def refusals(scene: Scene) -> None:
    make = hpcsgd.accelerate.Accelerator
    assert (
        refusal(lambda: make(method=method())) == "Accelerator: expected topology= or groups=, given neither"
    )
    assert "method = 'bsp': expected a Method" in refusal(lambda: make(groups=2, method="bsp"))  # pyright: ignore[reportArgumentType]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert "fsdp_plugin is another way" in refusal(lambda: accelerator(scene, fsdp_plugin=plugin))
    ours = accelerator(scene)
    wrapped = nn.parallel.DistributedDataParallel(gpt2())
    assert "inside DistributedDataParallel" in refusal(lambda: ours.prepare(wrapped))
    divided = DataLoader(DATA, BATCH, sampler=hpcsgd.Sampler(DATA, scene.topology))
    assert "divides the samples already" in refusal(lambda: ours.prepare(divided))
    optimizer = torch.optim.SGD(gpt2().parameters(), 0.1)
    assert "no prepared model has the parameters" in refusal(lambda: ours.prepare(optimizer))
    ours, model, optimizer, loader = prepared(scene, gradient_accumulation_steps=2)
    loop(ours, model, optimizer, loader, steps=1)
    assert "after backward passes inside no_sync()" in refusal(lambda: ours.save_state(str(scene.folder)))
    for clip in (ours.clip_grad_norm_, ours.clip_grad_value_):
        assert "call it if accelerator.sync_gradients" in refusal(
            lambda clip=clip: clip(model.parameters(), 1.0)
        )
    ours, model, optimizer, loader = prepared(scene)
    (scene.folder / "elsewhere").mkdir(parents=True, exist_ok=True)
    accelerate.Accelerator.save_state(ours, str(scene.folder / "elsewhere"))
    hpcsgd.barrier(scene.topology)
    assert "has no folder 'hpcsgd' with a checkpoint" in refusal(
        lambda: ours.load_state(str(scene.folder / "elsewhere"))
    )


if __name__ == "__main__":
    run_all(
        [
            the_bits_of_a_plain_loop, accumulation_with_a_rest, another_number_of_passes_later, bfloat16,
            float16, prepared_one_by_one, two_models_and_schedulers, evaluation,
            the_saved_model_is_the_average, a_checkpoint, checkpoints_with_names_by_number, refusals,
        ]
    )  # fmt: skip
