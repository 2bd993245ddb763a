"""Requests to other ranks, which answer them while they compute.

Passive MPI windows make no progress across hosts while the target computes, so every rank has a thread that
receives and answers. Requests and answers travel on separate communicators. The receives of answers are
posted before the requests are sent, so that no two threads ever wait for each other.
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
"""A function of a sender's rank and its request. It returns the answers that can be given now, each with the
rank that waits for it. One thread calls it, for one request after another."""


class PendingRequest:
    """Requests that have been sent and may not have been answered yet."""

    def __init__(self, sent: Work, answered: Work) -> None:
        self._sent, self._answered = sent, answered

    def wait(self) -> None:
        """Return once all answers are there. Raises `PeerLost` after the communicator's timeout."""
        self._sent.wait()
        self._answered.wait()


class RequestServer:
    """The server of one rank: a thread that answers requests of other ranks. All ranks make one together.

    Every request gets one answer, at once or later. No rank leaves while others may send requests. At
    shutdown, each waits until all have their last answer.
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
        comm_thread.before_exit, comm_thread.state.serves = self._shut_down, True
        world.dup_threads.append(comm_thread)
        self._replies = self._answers.with_thread(comm_thread)
        self._serving = self._replies.run(self._serve_or_end, "answering others")

    def ask(self, questions: Mapping[int, Tensor], answers: Mapping[int, Tensor]) -> PendingRequest:
        """Send a request to each rank in `questions`, and receive its answer into `answers`.

        Both dicts have uint8 tensors by rank. A rank may send a request to itself. All these tensors must
        stay untouched until `wait()` returns.
        """
        answered = self._answers.sendrecv({}, answers)
        return PendingRequest(self._questions.sendrecv(questions, {}), answered)

    @contextmanager
    def at_rest(self) -> Generator[None, None, None]:
        """Return a context inside which no rank has a request in progress. Collective.

        Entering and leaving it wait until every rank has all its answers.
        """
        self._serve_until_all_rest()
        yield
        self._serve_until_all_rest()

    def _serve_until_all_rest(self) -> None:
        """Return once every rank has all its answers."""
        self._answers.allreduce(torch.zeros(1)).wait()

    def _serve_or_end(self) -> None:
        """Serve, and end the job after an error: a rank that waits for an answer would not learn of it."""
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
