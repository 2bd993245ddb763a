"""Questions to other ranks, answered while they compute.

Passive MPI windows make no progress across hosts while the target computes; so every rank has a thread that
receives and answers. Questions and answers travel on communicators of their own: the answers' receives are
posted before the questions leave, so that no thread ever waits for another one that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hpcsgd.comm.backend import ANY, PeerLost
from hpcsgd.comm.comm_thread import CommThread, Work
from hpcsgd.comm.communicator import Communicator
from hpcsgd.comm.shutdown import end_by

Answer = Callable[[int, Tensor], Iterable[tuple[int, Tensor]]]
"""Of a question and the rank it came from: answers that can be given now, each with the rank that waits for
it. Called by one thread, one question after another."""


class PendingRequest:
    """Questions under way."""

    def __init__(self, sent: Work, answered: Work) -> None:
        self._sent, self._answered = sent, answered

    def wait(self) -> None:
        """Return once all answers are there. Raises `PeerLost` after the transport's timeout."""
        self._sent.wait()
        self._answered.wait()


class RequestServer:
    """One on every rank of `world`, made by all at once. Every question gets one answer, maybe later.

    Nobody leaves while others may still ask: the lanes' farewell waits for everybody's last answer.
    """

    def __init__(self, world: Communicator, answer: Answer, question_bytes: int) -> None:
        self._questions, self._answers = world.dup_with_thread(), world.dup_with_thread()
        for ranks in (self._questions, self._answers):
            if ranks.member is not None:
                ranks.member.answers = True
        self._answer = answer
        self._question = torch.zeros(question_bytes, dtype=torch.uint8)
        self._over = False
        comm_thread = CommThread(f"server of rank {world.rank}")
        comm_thread.before_exit, comm_thread.serves = self._shut_down, True
        world.dup_threads.append(comm_thread)
        self._replies = self._answers.with_thread(comm_thread)
        self._serving = self._replies.run(self._serve_or_end, "answering others")

    def ask(self, questions: Mapping[int, Tensor], answers: Mapping[int, Tensor]) -> PendingRequest:
        """Send uint8 `questions` to the ranks that are the keys, maybe itself; `answers` has room for theirs.

        Room and questions must stay untouched until `wait()` returns."""
        answered = self._answers.sendrecv({}, answers)
        return PendingRequest(self._questions.sendrecv(questions, {}), answered)

    @contextmanager
    def at_rest(self) -> Generator[None, None, None]:
        """Inside the block nobody has a question under way; collective."""
        self._serve_until_all_rest()
        yield
        self._serve_until_all_rest()

    def _serve_until_all_rest(self) -> None:
        """Return once everybody has had all answers."""
        self._answers.allreduce(torch.zeros(1)).wait()

    def _serve_or_end(self) -> None:
        """Whoever waits for an answer would not learn what went wrong here: end the job."""
        try:
            self._serve()
        except PeerLost:
            raise
        except BaseException as error:
            end_by(error)
            self._replies.backend.abort(1)
            raise

    def _serve(self) -> None:
        while True:
            source = self._questions.backend.recv(self._question, ANY)
            if self._over:
                return
            for to, answer in self._answer(source, self._question):
                self._replies.send(answer, to).wait()

    def _shut_down(self) -> None:
        self._serve_until_all_rest()
        self._over = True
        self._questions.send(self._question.clone(), self._questions.rank).wait()
        self._serving.wait()
