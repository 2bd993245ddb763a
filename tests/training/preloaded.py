"""Started once, it becomes one `python -m hpcsgd` after another: new processes that have torch already.

Reads a line of JSON for each: words, folder, environment, and files for stdout and stderr; answers with the
exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import torch

import hpcsgd.training  # noqa: F401 - all that `train` imports, but for MPI

torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer imports torch's compiler


def serve() -> None:
    """Return in the processes that shall become `hpcsgd`; the server itself ends here."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            become(order)
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def become(order: dict[str, object]) -> None:
    """A process that was started with these words in this folder and environment."""
    folder, words, environment = str(order["folder"]), order["words"], order["environment"]
    assert isinstance(words, list)
    assert isinstance(environment, dict)
    os.chdir(folder)
    os.environ.update(environment)
    for stream, name in ((0, os.devnull), (1, str(order["out"])), (2, str(order["err"]))):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, stream)
        os.close(file)
    sys.argv = ["hpcsgd", *words]
    sys.path[0] = folder


serve()
runpy.run_module("hpcsgd", run_name="__main__", alter_sys=True)
