"""`python endings.py HOW` runs a training with Lightning on 2 ranks that fails or gets a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from scene import BATCH, DATA, Net
from torch.utils.data import DataLoader

import lightning
from hpcsgd.lightning import HpcsgdStrategy
from hpcsgd.methods import hierarchical


class Raises(Net):
    """A module that raises on rank 1, after the gradients of its third step have been sent."""

    def on_after_backward(self) -> None:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 2:
            raise ValueError("of rank 1")


class Hangs(Net):
    """A module that raises on rank 1 while the other rank is in a long step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            if self.trainer.global_rank == 1:
                raise ValueError("of rank 1")
            time.sleep(60)
        return super().training_step(batch, batch_idx)


class Signalled(Net):
    """A module whose ranks get a signal: rank r in the step `at[r]`, after its gradients have been sent."""

    def __init__(self, number: int, at: dict[int, int]) -> None:
        super().__init__()
        self._number, self._at = number, at

    def on_after_backward(self) -> None:
        if self.trainer.global_step == self._at.get(self.trainer.global_rank):
            os.kill(os.getpid(), self._number)


SIGNALLED = {
    "TERM on all": (signal.SIGTERM, {0: 2, 1: 2}),
    "TERM on all, in other steps": (signal.SIGTERM, {0: 3, 1: 2}),
    "TERM on 1": (signal.SIGTERM, {1: 2}),
    "INT on all": (signal.SIGINT, {0: 2, 1: 2}),
    "INT on 1": (signal.SIGINT, {1: 2}),
}


def main(how: str) -> None:
    print(f"begins at {time.monotonic()}", flush=True)  # after the imports, which may take long
    devices = {"devices": 1}.get(how, 2)
    backend = {"mpi": "mpi"}.get(how, "auto")
    if how in SIGNALLED:
        module: Net = Signalled(*SIGNALLED[how])
    else:
        module = {"raises": Raises, "hangs": Hangs}.get(how, Net)()
    strategy = HpcsgdStrategy(lambda: hierarchical(4), groups=1, backend=backend)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(DATA, BATCH, shuffle=True))
    print("trained", flush=True)
    if how == "rank 0 saves" and trainer.global_rank == 0:
        trainer.save_checkpoint("alone.ckpt")


if __name__ == "__main__":
    main(sys.argv[1])
