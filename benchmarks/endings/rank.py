"""One rank of `endings.py`: it has a fault, or sums vectors with the others until the job ends.

    rank.py BACKEND FAULT FILE TIMEOUT

The rank with the fault creates FILE at the moment of the fault. The others wait TIMEOUT seconds for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from hpcsgd.comm import exit_all, joining

FAULTY = 2
"""The rank that has the fault."""


def main() -> None:
    backend, fault, file = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    world = joining.world(float(sys.argv[4]), backend)
    world.barrier()
    if fault == "stop":  # all ranks leave together, as at the end of a batch job
        file.touch()
        exit_all(75)
    if world.rank == FAULTY:
        file.touch()
        match fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise ValueError("an exception of one rank")
            case "exit":
                sys.exit(3)
            case "hang":
                time.sleep(600)
    while True:
        world.allreduce(torch.ones(1000)).wait()


if __name__ == "__main__":
    main()
