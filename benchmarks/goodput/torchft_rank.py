"""One replica of torchft's LocalSGD, a group of one rank.

It saves its state after every synchronization, so that nothing is lost if all replicas die at once. It writes
the step before and after each synchronization to a file.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
from torchft.local_sgd import LocalSGD  # pyright: ignore[reportMissingImports]

from goodput.network import CLASSES, INPUTS, Net
from goodput.processes import RANK

HERE = "127.0.0.1"
TIMEOUT, PATIENCE = timedelta(seconds=10), timedelta(seconds=600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    given = parser.parse_args()
    replica = os.environ[RANK]
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(1)
    model = Net(given.seconds)
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {name: x.clone() for name, x in model.state_dict().items()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=HERE,
        store_port=store.port,
        lighthouse_addr=given.lighthouse,
        replica_id=f"replica_{replica}",
        hostname=HERE,
        init_sync=False,
    )
    checkpoint = Path(f"replica-{replica}.pt")
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        manager.load_state_dict(saved["manager"])
    with LocalSGD(manager, model, optimizer, given.every), open(f"told-{replica}.jsonl", "a") as file:
        while True:
            before = manager.current_step()
            for _ in range(given.every):
                optimizer.zero_grad()
                x, y = torch.randn(given.batch, INPUTS), torch.randint(CLASSES, (given.batch,))
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            beside = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "manager": manager.state_dict()}, beside)
            beside.replace(checkpoint)
            file.write(json.dumps({"before": before, "after": manager.current_step()}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
