"""A program for 4 ranks: each group continues from a checkpoint of the Trainer with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import torch
import transformers
from safetensors.torch import load_file

import hpcsgd
import hpcsgd.transformers
from hpcsgd import DistributedOptimizer
from hugging_face.models import BATCH, Tokens, arguments, digest, gpt2, lora
from hugging_face.running import Scene, refusal, run_all, same

DATA = Tokens(6 * 4 * BATCH)
EPOCH = 6
"""The steps of an epoch; no epoch ends with a synchronization."""


def trainer(scene: Scene, model: Any = None, *, method: Any = None, **more: Any) -> Any:
    args = arguments(scene.folder, **{"num_train_epochs": 2, "save_strategy": "epoch", **more})
    given = {"train_dataset": DATA, "eval_dataset": Tokens(32, 1), "topology": scene.topology}
    method = method or hpcsgd.hierarchical(sync_every=5)
    return hpcsgd.transformers.Trainer(model or gpt2(), args, method=method, **given)


def of(given: Any) -> DistributedOptimizer:
    (optimizer,) = given.accelerator.distributed_optimizers
    return optimizer


def checkpoint(scene: Scene, steps: int = EPOCH) -> Path:
    return scene.folder / f"checkpoint-{steps}"


def state(given: Any) -> str:
    """Return the bits of this rank's model and of its group's optimizer state, and the counters."""
    found = of(given).state_dict()
    moments = [x for each in found["state"].values() for x in each.values()]
    return str(
        (digest(given.model), [x.double().sum().item() for x in moments], of(given).t, of(given).rates)
    )


def resumes(scene: Scene, model: Any = gpt2, method: Any = None, **more: Any) -> None:
    """Check that two epochs give the same bits as one, a checkpoint, and another."""
    through = trainer(scene, model(), method=method, **more)
    through.train()
    again = trainer(scene, model(), method=method, **more)
    again.train(resume_from_checkpoint=str(checkpoint(scene)))
    assert of(again).t == 2 * EPOCH
    assert state(again) == state(through)
    assert not same(digest(again.model), scene.topology), "each group has its own model"


def hierarchical(scene: Scene) -> None:
    resumes(scene)


def diloco(scene: Scene) -> None:
    resumes(scene, method=hpcsgd.diloco(sync_every=5))


def in_the_middle_of_an_epoch(scene: Scene) -> None:
    through = trainer(scene, save_strategy="steps", save_steps=4)
    through.train()
    again = trainer(scene, save_strategy="no")
    again.train(resume_from_checkpoint=str(checkpoint(scene, 4)))
    assert state(again) == state(through)


def an_adapter(scene: Scene) -> None:
    resumes(scene, lora, lr_scheduler_type="constant")
    assert not (checkpoint(scene) / "model.safetensors").exists()
    with h5py.File(next((checkpoint(scene) / "hpcsgd").rglob("rank-00000.h5"))) as file:
        found: list[Any] = [file[name] for name in file if name != "structure"]
        numbers = sum(each.size for each in found)
    assert numbers < gpt2().transformer.wte.weight.numel() * 4, "frozen parameters are not saved"


def of_rank_0_alone(scene: Scene) -> None:
    """A checkpoint is one folder, which may be moved; its model is the average."""
    through = trainer(scene)
    through.train()
    moved = scene.folder / "moved"
    if scene.topology.rank == 0:
        shutil.move(checkpoint(scene), moved)
    hpcsgd.barrier(scene.topology)
    again = trainer(scene)
    again.train(resume_from_checkpoint=str(moved))
    assert state(again) == state(through)
    saved = load_file(checkpoint(scene, 2 * EPOCH) / "model.safetensors")
    with of(again).averaged_model():
        assert all(torch.equal(x, again.model.state_dict()[name]) for name, x in saved.items())


def the_best_model(scene: Scene) -> None:
    best = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    ours = trainer(scene, save_total_limit=1, greater_is_better=True, **best)
    ours.train()
    assert ours.state.best_model_checkpoint == str(checkpoint(scene)), "the first loss is the greatest"
    saved = load_file(checkpoint(scene) / "model.safetensors")
    assert all(torch.equal(x, ours.model.state_dict()[name]) for name, x in saved.items())
    assert same(digest(ours.model), scene.topology)
    loss = next(log["eval_loss"] for log in ours.state.log_history if "eval_loss" in log)
    assert abs(ours.evaluate()["eval_loss"] - loss) < 1e-6


def a_second_training_that_resumes(scene: Scene) -> None:
    ours = trainer(scene)
    ours.train()
    first = state(ours)
    ours.train(resume_from_checkpoint=str(checkpoint(scene)))
    assert state(ours) == first


def a_folder_of_an_earlier_training(scene: Scene) -> None:
    longer = trainer(scene)
    longer.train()
    longer.args.num_train_epochs = 1
    longer.train()  # saves checkpoint-6 after 18 updates
    assert of(longer).t == 3 * EPOCH
    resumes(scene)


def of_a_trainer_without_hpcsgd(scene: Scene) -> None:
    args = arguments(scene.folder, num_train_epochs=2, save_strategy="epoch")
    plain: Any = transformers.Trainer(gpt2(), args, train_dataset=DATA)
    plain.train()
    ours = trainer(scene)
    ours.train(resume_from_checkpoint=str(checkpoint(scene)))
    assert of(ours).t == EPOCH
    steps = {int(each["step"]) for each in of(ours).state_dict()["state"].values()}
    assert steps == {2 * EPOCH}, "the optimizer has gone on"
    everywhere = trainer(scene, method=hpcsgd.bsp())
    everywhere.train(resume_from_checkpoint=str(checkpoint(scene)))
    theirs = torch.cat([p.detach().flatten() for p in plain.model.parameters()])
    mine = torch.cat([p.detach().flatten() for p in everywhere.model.parameters()])
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-4), "bsp is what DDP does"


def another_shape(scene: Scene) -> None:
    """A checkpoint of 2 x 2 continues on 4 x 1 from the average."""
    trainer(scene, num_train_epochs=1).train()
    topology = hpcsgd.init(groups=4)
    ours = trainer(Scene(topology, scene.folder), max_steps=EPOCH, num_train_epochs=2)
    ours.train(resume_from_checkpoint=str(checkpoint(scene)))
    saved = load_file(checkpoint(scene) / "model.safetensors")
    assert all(torch.allclose(x, ours.model.state_dict()[name], atol=1e-7) for name, x in saved.items())
    assert same(digest(ours.model), topology)


def refusals(scene: Scene) -> None:
    trainer(scene, num_train_epochs=1).train()
    other = trainer(scene, method=hpcsgd.sgp())
    assert "state of the method" in refusal(
        lambda: other.train(resume_from_checkpoint=str(checkpoint(scene)))
    )
    if scene.topology.rank == 0:
        next((checkpoint(scene) / "hpcsgd").rglob("rank-00003.h5")).unlink()
    hpcsgd.barrier(scene.topology)
    ours = trainer(scene)
    assert "damaged" in refusal(lambda: ours.train(resume_from_checkpoint=str(checkpoint(scene))))
    if scene.topology.rank == 0:
        shutil.rmtree(checkpoint(scene) / "hpcsgd/step-00000006")
    hpcsgd.barrier(scene.topology)
    ours = trainer(scene)
    assert "not completely" in refusal(lambda: ours.train(resume_from_checkpoint=str(checkpoint(scene))))


if __name__ == "__main__":
    run_all(
        [
            hierarchical, diloco, in_the_middle_of_an_epoch, an_adapter, of_rank_0_alone, the_best_model,
            a_second_training_that_resumes, a_folder_of_an_earlier_training, of_a_trainer_without_hpcsgd,
            another_shape, refusals,
        ]
    )  # fmt: skip
