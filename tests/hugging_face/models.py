"""A small GPT-2 with random weights, a LoRA of it, tokens, and a digest for comparisons."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

transformers.logging.set_verbosity_error()
logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
LENGTH, BATCH = 12, 4


class Tokens(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a random token, modulo 11."""

    def __init__(self, count: int, seed: int = 0) -> None:
        first = torch.randint(0, 11, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (first + torch.arange(LENGTH)) % 11

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def gpt2() -> transformers.GPT2LMHeadModel:
    """Return a model of two layers without dropout, the same on all ranks."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def lora() -> Any:
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), settings)


def arguments(folder: Path, **more: Any) -> transformers.TrainingArguments:
    plain: dict[str, Any] = {
        "num_train_epochs": 1, "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH,
        "learning_rate": 1e-2, "optim": "adamw_torch", "save_strategy": "no", "use_cpu": True, "seed": 1,
        "disable_tqdm": True, "report_to": [], "logging_strategy": "no",
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**plain, **more})


def digest(model: nn.Module) -> str:
    """Return a hash of the bits of this rank's model."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(flat.float().numpy().tobytes()).hexdigest()
