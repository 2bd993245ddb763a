"""A server that forks processes which have imported torch already, and which then run Python programs.

forked.py starts a program: it sends the program's command line, folder, environment and open files over the
socket at the given address. The server answers with the process id and, at the end, with the exit code. If
forked.py ends earlier, the server kills the process. When the server's stdin ends, it kills all processes
and ends.
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

import hpcsgd.train.run  # noqa: F401 - the commands import it; MPI starts later

torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer imports torch's compiler

MESSAGE, FILES = 1 << 18, 64  # the most bytes and open files of an order
ABOVE = 512  # file descriptors from here on are in no order
HANGS = 90.0  # seconds, after which a process prints where its threads are, before it is killed


class Server:
    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{address}-to-be")
        self._listener.listen(64)
        Path(f"{address}-to-be").rename(address)  # from now on clients may connect
        self._watch(sys.stdin, self._end)
        self._watch(self._listener, self._accept)
        self._running: dict[socket.socket, int] = {}  # process ids by the client that waits for the process
        self._become: list[str] | None = None

    def serve(self) -> list[str]:
        """Serve until this is a forked process, and return in it the command line of its program."""
        while True:
            for key, _ in self._selector.select():
                if key in self._selector.get_map().values():  # an earlier event may have removed it
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
        with suppress(OSError):  # the client was killed, which `_abandoned` handles
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
        for waiting in (asking, *self._running):  # also clients that ended, which are no longer watched
            waiting.close()
        self._selector.close()

    def _abandoned(self, asking: socket.socket) -> None:
        """Kill the process of a client that was killed."""
        self._selector.unregister(asking)
        kill(self._running[asking])

    def _ended(self, asking: socket.socket, process: int) -> None:
        self._selector.unregister(process)
        os.close(process)
        child = self._running.pop(asking)
        kill(child)  # the processes that it started, such as data workers
        _, status = os.waitpid(child, 0)
        if asking in self._selector.get_map():
            self._selector.unregister(asking)
        with suppress(OSError):  # the client was killed
            asking.send(str(os.waitstatus_to_exitcode(status)).encode())
        asking.close()

    def _end(self, _) -> None:
        for child in self._running.values():
            kill(child)
        sys.exit()


def kill(child: int) -> None:
    """Kill a process and all that it has started, as launchers do."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it has just been forked
        os.kill(child, signal.SIGKILL)


def become(order: dict, files: list[int]) -> None:
    """Make this process like one that was started with the command line, folder and other data of `order`.

    `files` are the received open files; `order` has the descriptors that they get.
    """
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
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):  # not the server's handlers
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
gc.freeze()  # children's garbage collection then leaves the memory of these objects shared
WORDS = Server(sys.argv[1]).serve()
if WORDS[0] == "-m":
    runpy.run_module(WORDS[1], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(WORDS[0], run_name="__main__")
