"""A program for 4 ranks: the Trainer trains the same bits as a plain loop of hpcsgd."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.utils.data import DataLoader, IterableDataset

import hpcsgd
import hpcsgd.transformers
from hpcsgd import DistributedOptimizer
from hugging_face.models import BATCH, LENGTH, Tokens, arguments, digest, gpt2, lora
from hugging_face.running import Scene, refusal, run_all, same

METHOD = hpcsgd.hierarchical(sync_every=5)
DATA = Tokens(8 * 4 * BATCH)


def trainer(scene: Scene, model: Any = None, *, method: Any = METHOD, **more: Any) -> Any:
    data = more.pop("train_dataset", DATA)
    args = arguments(scene.folder, train_sampling_strategy="sequential", **more)
    given = {"train_dataset": data, "eval_dataset": Tokens(32, 1), "topology": scene.topology}
    return hpcsgd.transformers.Trainer(model or gpt2(), args, method=method, **given)


def plain_loop(scene: Scene, *, passes: int = 1, max_norm: float = 1.0, bf16: bool = False, epochs: int = 1):
    """Run the same training without the Trainer, and return model and optimizer."""
    topology = scene.topology
    model = gpt2()
    inner = transformers.Trainer(model, arguments(scene.folder)).create_optimizer()
    method = hpcsgd.hierarchical(sync_every=5)
    optimizer = DistributedOptimizer(inner, model, topology, method, gradient_accumulation_steps=passes)
    batches = list(DataLoader(DATA, BATCH))[topology.rank :: topology.world_size]
    chunks = [batches[i : i + passes] for i in range(0, len(batches), passes)]
    scheduler = transformers.get_scheduler("linear", optimizer, 0, epochs * len(chunks))
    for chunk in epochs * chunks:
        items = len(chunk) * topology.world_size * BATCH * LENGTH
        for batch in chunk:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**batch, num_items_in_batch=torch.tensor(items)).loss
            (loss * topology.world_size).backward()
        optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer


def of(given: Any) -> DistributedOptimizer:
    (optimizer,) = given.accelerator.distributed_optimizers
    return optimizer


def mean_digest(given: Any) -> str:
    with of(given).averaged_model():
        return digest(given.model)


def equals(scene: Scene, expected: dict[str, Any], **more: Any) -> Any:
    """Check that a Trainer with these arguments trains the bits of the plain loop, and return it."""
    ours = trainer(scene, **more)
    ours.train()
    model, optimizer = plain_loop(scene, **expected)
    assert of(ours).t == optimizer.t
    assert digest(ours.model) == digest(model)
    return ours


def the_bits_of_a_plain_loop(scene: Scene) -> None:
    ours = equals(scene, {})
    assert of(ours).t == 8
    assert not same(digest(ours.model), scene.topology), "groups differ 3 steps after a synchronization"


def no_wrapper_around_the_model(scene: Scene) -> None:
    ours = trainer(scene, max_steps=1)
    ours.train()
    assert ours.model_wrapped is ours.model
    assert type(ours.model) is transformers.GPT2LMHeadModel
    assert type(of(ours).local.optimizer) is torch.optim.AdamW


def clipping(scene: Scene) -> None:
    clipped = equals(scene, {"max_norm": 0.1}, max_grad_norm=0.1, logging_strategy="steps", logging_steps=1)
    free = equals(
        scene, {"max_norm": float("inf")}, max_grad_norm=0, logging_strategy="steps", logging_steps=1
    )
    assert digest(clipped.model) != digest(free.model)
    norms = [
        [log["grad_norm"] for log in each.state.log_history if "grad_norm" in log] for each in (clipped, free)
    ]
    assert norms[0][0] == norms[1][0] > 0.1, "the norm before clipping is logged"


def accumulation(scene: Scene) -> None:
    equals(scene, {"passes": 2}, gradient_accumulation_steps=2)


def accumulation_with_a_rest(scene: Scene) -> None:
    assert of(equals(scene, {"passes": 3}, gradient_accumulation_steps=3)).t == 3


class Stream(IterableDataset[Any]):
    """A dataset without a length: epochs have 5 batches on each of 4 ranks."""

    def __iter__(self) -> Any:
        return iter([DATA[i] for i in range(5 * 4 * BATCH)])


def accumulation_over_the_end_of_an_epoch(scene: Scene) -> None:
    """The odd pass of an epoch belongs to the next step, as in the Trainer of transformers."""
    ours = trainer(scene, train_dataset=Stream(), gradient_accumulation_steps=2, max_steps=3)
    backward, found = ours.accelerator.backward, []

    def noted(loss: Any, **more: Any) -> None:
        backward(loss, **more)
        found.append(ours.accelerator.sync_gradients)
        assert of(ours).updating.in_no_sync is not found[-1], "only passes before a step average"

    ours.accelerator.backward = noted
    ours.train()
    assert of(ours).t == 3
    assert found == [False, True, False, True, False, False, True]


def a_schedule_free_optimizer(scene: Scene) -> None:
    """The Trainer itself calls `eval()` of the optimizer in an evaluation, and `train()` in each step."""
    plain = trainer(scene, optim="schedule_free_adamw")
    plain.train()
    ours = trainer(
        scene, optim="schedule_free_adamw", eval_strategy="steps", eval_steps=3, eval_on_start=True
    )
    ours.train()
    assert digest(ours.model) == digest(plain.model), "evaluations change nothing"


def bfloat16(scene: Scene) -> None:
    equals(scene, {"bf16": True}, bf16=True)


def evaluation_of_the_average(scene: Scene) -> None:
    ours = trainer(scene)
    ours.train()
    before = digest(ours.model)
    loss = ours.evaluate()["eval_loss"]
    predicted = ours.predict(Tokens(32, 1)).metrics["test_loss"]
    assert digest(ours.model) == before
    with of(ours).averaged_model(), torch.no_grad():
        tokens = Tokens(32, 1).tokens
        items = torch.tensor(tokens.numel())  # the Trainer counts all tokens, including the first ones
        expected = ours.model.eval()(input_ids=tokens, labels=tokens, num_items_in_batch=items).loss.item()
    assert abs(loss - expected) < 1e-5 * expected
    assert loss == predicted
    assert same(loss, scene.topology)


def several_evaluations_in_one(scene: Scene) -> None:
    ours = trainer(scene)
    ours.train()
    found = ours.evaluate({"few": Tokens(5, 1), "many": Tokens(32, 1)})
    assert found["eval_many_loss"] == ours.evaluate()["eval_loss"]


def the_saved_model_is_the_average(scene: Scene) -> None:
    ours = trainer(scene)
    ours.train()
    ours.save_model(str(scene.folder / "saved"))
    hpcsgd.barrier(scene.topology)
    again = transformers.GPT2LMHeadModel.from_pretrained(scene.folder / "saved")
    assert digest(again) == mean_digest(ours) != digest(ours.model)


def a_second_training(scene: Scene) -> None:
    ours = trainer(scene)
    ours.train()
    optimizer = of(ours)
    ours.train()
    assert of(ours) is optimizer
    assert optimizer.t == 16
    assert ours.model_wrapped is ours.model


def a_model_made_for_each_training(scene: Scene) -> None:
    args = arguments(scene.folder, train_sampling_strategy="sequential")
    ours: Any = hpcsgd.transformers.Trainer(
        args=args, model_init=gpt2, train_dataset=DATA, topology=scene.topology, method=METHOD
    )
    ours.train()
    first = digest(ours.model)
    ours.train()
    assert digest(ours.model) == first
    assert of(ours).t == 8


def an_optimizer_of_the_user(scene: Scene) -> None:
    model = gpt2()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    args = arguments(scene.folder)
    ours: Any = hpcsgd.transformers.Trainer(
        model, args, train_dataset=DATA, optimizers=(sgd, None), topology=scene.topology, method=METHOD
    )
    ours.train()
    assert of(ours).local.optimizer is sgd
    assert of(ours).t == 8


def the_mixin(scene: Scene) -> None:
    class Counting(transformers.Trainer):
        """A Trainer of a third party, with an additional argument."""

        def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.factor = factor

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            return self.factor * loss

    class Ours(hpcsgd.transformers.TrainerMixin, Counting):
        pass

    args = arguments(scene.folder, train_sampling_strategy="sequential")
    given = {"train_dataset": DATA, "topology": scene.topology, "method": METHOD}
    ours: Any = Ours(gpt2(), args, factor=1.0, **given)
    ours.train()
    assert digest(ours.model) == digest(plain_loop(scene)[0])


def options_of_the_optimizer(scene: Scene) -> None:
    given = {"train_dataset": DATA, "topology": scene.topology, "method": METHOD}
    options = {"overlap_grad_reduce": False, "bucket_cap_mb": 0.001}
    ours = hpcsgd.transformers.Trainer(gpt2(), arguments(scene.folder, max_steps=1), options=options, **given)
    ours.train()
    assert len(of(ours).buckets) > 4


def an_adapter(scene: Scene) -> None:
    ours = trainer(scene, lora())
    base = digest(ours.model.get_base_model().transformer.wte)
    ours.train()
    trained = [name for name, _ in of(ours).trained]
    assert len(trained) == 4
    assert all("lora" in name for name in trained)
    assert digest(ours.model.get_base_model().transformer.wte) == base
    assert not same(digest(ours.model), scene.topology)
    ours.save_model(str(scene.folder / "saved"))
    hpcsgd.barrier(scene.topology)
    saved = load_file(scene.folder / "saved/adapter_model.safetensors")
    with of(ours).averaged_model():
        mine = {name: p for name, p in ours.model.named_parameters() if "lora" in name}
        assert all(torch.equal(saved[name.replace(".default", "")], p) for name, p in mine.items())


def refusals(scene: Scene) -> None:
    def given(**more: Any) -> str:
        args = more.pop("args", arguments(scene.folder))
        model = more.pop("model", None) or gpt2()
        settings = {"method": METHOD, "topology": scene.topology, **more}
        return refusal(lambda: hpcsgd.transformers.Trainer(model, args, **settings))

    assert given(topology=None) == "Trainer: expected topology= or groups=, given neither"
    assert given(groups=2) == "Trainer: expected topology= or groups=, given both"
    assert "method = 'bsp': expected a Method" in given(method="bsp")
    wrapped = torch.nn.parallel.DistributedDataParallel(gpt2())
    assert "the model is inside DistributedDataParallel" in given(model=wrapped)
    assert "fsdp is another way" in given(args=arguments(scene.folder, fsdp=True))
    assert "bf16_full_eval converts" in given(args=arguments(scene.folder, bf16_full_eval=True))
    alone = arguments(scene.folder)
    alone.distributed_state = None  # as if they were made before the ranks were known
    assert "call hpcsgd.transformers.init before TrainingArguments" in given(args=alone)
    ours = trainer(scene, max_steps=1)
    optimizer = torch.optim.SGD(ours.model.parameters(), 0.1)
    ours.optimizer = DistributedOptimizer(optimizer, ours.model, scene.topology, hpcsgd.bsp())
    assert "is a DistributedOptimizer already" in refusal(ours.train)


if __name__ == "__main__":
    run_all(
        [
            the_bits_of_a_plain_loop, no_wrapper_around_the_model, clipping, accumulation,
            accumulation_with_a_rest, accumulation_over_the_end_of_an_epoch, a_schedule_free_optimizer,
            bfloat16, evaluation_of_the_average, several_evaluations_in_one,
            the_saved_model_is_the_average, a_second_training, a_model_made_for_each_training,
            an_optimizer_of_the_user, the_mixin, options_of_the_optimizer, an_adapter, refusals,
        ]
    )  # fmt: skip
