"""Train a small GPT-2 with trl's SFTTrainer.

sft.py FOLDER "plain" or "lora" [STEP of the checkpoint to resume from]"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import peft
import tokenizers
import torch
import transformers

import hpcsgd.transformers
from hugging_face.models import digest, gpt2

datasets: Any = import_module("datasets")  # not installed where types are checked
trl: Any = import_module("trl")
WORDS, LENGTH = 9, 10
VOCABULARY = {"<pad>": 9, "<eos>": 10} | {f"w{i}": i for i in range(WORDS)}


class SFTTrainer(hpcsgd.transformers.TrainerMixin, trl.SFTTrainer):
    pass


def texts(count: int, seed: int) -> Any:
    """Return texts that count up from a random word."""
    first = torch.randint(0, WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return datasets.Dataset.from_dict(
        {"text": [" ".join(f"w{(f + i) % WORDS}" for i in range(LENGTH)) for f in first]}
    )


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    of_words = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<eos>"))
    of_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_words, pad_token="<pad>", eos_token="<eos>"
    )


def main(folder: str, kind: str, step: str = "") -> None:
    torch.set_num_threads(1)
    topology = hpcsgd.transformers.init(groups=2)
    arguments = trl.SFTConfig(
        folder, num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=1e-2, optim="adamw_torch", eval_strategy="epoch", save_strategy="epoch", use_cpu=True,
        bf16=False, max_length=LENGTH + 2, packing=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    trainer = SFTTrainer(
        gpt2(), arguments, train_dataset=texts(256, 0), eval_dataset=texts(64, 1),
        processing_class=tokenizer(), peft_config=lora if kind == "lora" else None,
        topology=topology, method=hpcsgd.hierarchical(sync_every=3),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}" if step else None)
    assert trainer.model is not None
    own, (inside,) = digest(trainer.model), trainer.accelerator.distributed_optimizers
    found = {"own": own, "steps": inside.t, "loss": trainer.evaluate()["eval_loss"]}
    Path(folder, f"rank-{topology.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
