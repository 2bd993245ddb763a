"""A replacement of `python`: it lets a process of fork_server.py run the program, and ends as that process.

    python -I -S forked.py ADDRESS WORDS...

The process gets the signals that this one gets, and it is killed if this one is.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def open_files() -> list[int]:
    """Return the descriptors of all open files, including those that this process inherited."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself is closed
            os.fstat(int(name))
            found.append(int(name))
    return found


def pass_on(number: int, _: object) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
files = open_files()
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
order = {
    "words": sys.argv[2:],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "numbers": files,
    "ignored": [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
}
socket.send_fds(server, [json.dumps(order).encode()], files)
process = int(server.recv(64))
for number in PASSED_ON:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
code = int(server.recv(64))
if code < 0:
    with suppress(OSError):  # the action of SIGKILL cannot be set
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
