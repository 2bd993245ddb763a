"""Started once, it becomes one Python program after another: new processes that have torch already.

Each comes by way of forked.py, which sends what a process is made of over the socket at the address given:
its words, folder, environment and open files. It is told the process id and, at the end, the exit code; when
it goes away before, so does its process. The server ends, and all with it, when its stdin does.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

import hpcsgd.train.run  # noqa: F401 - what the commands import; MPI starts later

torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer imports torch's compiler

MESSAGE, FILES = 1 << 18, 64  # bytes and open files of an order, at most
ABOVE = 512  # file numbers that no order asks for
HANGS = 90.0  # seconds; then a process says where its threads are, before it is killed


class Server:
    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{address}-to-be")
        self._listener.listen(64)
        Path(f"{address}-to-be").rename(address)  # whoever sees it may connect
        self._watch(sys.stdin, self._end)
        self._watch(self._listener, self._accept)
        self._running: dict[socket.socket, int] = {}  # process ids, by who waits for them
        self._become: list[str] | None = None

    def serve(self) -> list[str]:
        """Return in the processes that shall become something else, with their words."""
        while True:
            for key, _ in self._selector.select():
                if key in self._selector.get_map().values():  # nor gone with one before it
                    key.data(key.fileobj)
                if self._become is not None:
                    return self._become

    def _watch(self, file, call) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _accept(self, _) -> None:
        asking, _ = self._listener.accept()
        self._watch(asking, self._fork)

    def _fork(self, asking: socket.socket) -> None:
        self._selector.unregister(asking)
        message, files, _, _ = socket.recv_fds(asking, MESSAGE, FILES)
        if not message:
            asking.close()
            return
        order = json.loads(message)
        child = os.fork()
        if child == 0:
            self._leave(asking)
            become(order, files)
            self._become = order["words"]
            return
        for file in files:
            os.close(file)
        self._running[asking] = child
        with suppress(OSError):  # it was killed itself, as will be heard
            asking.send(str(child).encode())
        self._watch(asking, self._abandoned)
        process = os.pidfd_open(child)
        self._watch(process, lambda _: self._ended(asking, process))

    def _leave(self, asking: socket.socket) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            elif key.fileobj is not sys.stdin:
                key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]
        for waiting in (asking, *self._running):  # also those that went away, which are no longer watched
            waiting.close()
        self._selector.close()

    def _abandoned(self, asking: socket.socket) -> None:
        """Whoever waited was killed: so is what it stood for."""
        self._selector.unregister(asking)
        kill(self._running[asking])

    def _ended(self, asking: socket.socket, process: int) -> None:
        self._selector.unregister(process)
        os.close(process)
        child = self._running.pop(asking)
        kill(child)  # its data workers, that is
        _, status = os.waitpid(child, 0)
        if asking in self._selector.get_map():
            self._selector.unregister(asking)
        with suppress(OSError):  # it was killed itself
            asking.send(str(os.waitstatus_to_exitcode(status)).encode())
        asking.close()

    def _end(self, _) -> None:
        for child in self._running.values():
            kill(child)
        sys.exit()


def kill(child: int) -> None:
    """With what it has started, as launchers do."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has just been forked
        os.kill(child, signal.SIGKILL)


def become(order: dict, files: list[int]) -> None:
    """A process that was started with these words in this folder and environment, with these files open."""
    os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, ABOVE) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, order["numbers"], strict=True):
        os.dup2(file, number)
        os.close(file)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):  # as it has them, not as we
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    for number in order["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    random.seed()
    np.random.seed()
    program, *_ = words = order["words"]
    sys.argv = words[1:] if program == "-m" else words
    sys.path[0] = order["folder"] if program == "-m" else str(Path(program).parent)
    faulthandler.dump_traceback_later(HANGS)


for module in sys.argv[2:]:
    importlib.import_module(module)
gc.freeze()  # what is here stays; a child need not touch it
WORDS = Server(sys.argv[1]).serve()
if WORDS[0] == "-m":
    runpy.run_module(WORDS[1], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(WORDS[0], run_name="__main__")
