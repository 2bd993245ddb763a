"""A simulated job as a GOAL schedule, the text that LogGOPSim and ATLAHS read.

    num_ranks 4
    rank 0 {
    l1: calc 120000000
    l2: send 17980b to 1 tag 0
    l3: recv 17980b from 1 tag 0
    l2 requires l1
    }

A message of b bytes takes α + b·β, of the sender and the receiver; α is `Message.latency` and β a nanosecond.
Then the longest way through the schedule is the simulated time, but for the rounding to nanoseconds. Where
ranks of a group, or all groups, meet, they do it by dissemination: ⌈log2 p⌉ rounds of a message to the rank
2^k places on, so that everybody has waited for everybody. Messages that nobody waits for before the end are
left out.

T. Hoefler, C. Siebert, A. Lumsdaine: Group Operation Assembly Language, ICPP 2009.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from hpcsgd.core.graphs import Graph, senders
from hpcsgd.errors import UserError, count_text
from hpcsgd.files.atomic import replacing
from hpcsgd.simulation.compute import Compute
from hpcsgd.simulation.simulate import Simulation
from hpcsgd.simulation.traffic import Scheduled, Traffic

NANO = 1e9
TAGS = 128
"""A step's: 32 for the rounds of each collective, and the messages."""
EXCHANGE, MEETING, MESSAGES, GATHER = 0, 32, 64, 96


def write(simulation: Simulation, target: Path) -> None:
    """Raises `UserError` where chance decides who waits for whom, where groups share a link, and where a
    collective is shorter than its messages."""
    if not isinstance(simulation.rule, Scheduled):
        raise UserError(
            f"{simulation.rule}: who waits for whom follows from chance: there is no schedule of it"
        )
    if simulation.layout.groups_on_a_host > 1 and simulation.durations.message.link:
        raise UserError(
            "a GOAL schedule has no queue at a link that groups share: give each group hosts of its own, "
            f"ranks_per_host = {simulation.layout.K}"
        )
    layout, T = simulation.layout, simulation.steps
    compute = Compute(layout, simulation.compute, simulation.stragglers, simulation.seed)
    seconds = [compute.seconds(t) for t in range(T)]
    with replacing(target) as part, part.open("w", encoding="ascii") as file:
        file.write(f"num_ranks {layout.N}\n")
        for g in range(layout.P):
            for j in range(layout.K):
                _Rank(simulation, simulation.rule.traffic(), g, j).write([s[g, j] for s in seconds], file)


class _Rank:
    """The part of one rank: its operations, and what each of them requires."""

    def __init__(self, simulation: Simulation, traffic: Traffic, g: int, j: int) -> None:
        self._P, self._K, self._d = simulation.layout.P, simulation.layout.K, simulation.durations
        self._traffic, self._g, self._j = traffic, g, j
        self._operations: list[str] = []
        self._requires: list[str] = []
        self._sent: list[list[str]] = []
        """The own messages, by step."""
        self._link: list[str] = []
        """What the link is busy with."""
        self._received: list[list[str]] = []

    def write(self, seconds: Sequence[float], file: TextIO) -> None:
        done: list[str] = []
        group = [self._g * self._K + j for j in range(self._K)]
        position = [g * self._K + self._j for g in range(self._P)]
        for t, computed in enumerate(seconds):
            done = [self._calc(float(computed), done)]
            done = self._together(group, self._d.exchange, TAGS * t + EXCHANGE, done)
            done = [self._calc(self._d.update, done)]
            if self._P > 1 and self._traffic.every and (t + 1) % self._traffic.every == 0:
                done = self._together(position, self._d.meeting, TAGS * t + MEETING, done)
            if self._P > 1 and self._traffic.graph is not None:
                done = self._messages(self._traffic.graph, t, len(seconds), done)
            done = self._together(group, self._d.gather, TAGS * t + GATHER, done)
        rank = self._g * self._K + self._j
        file.write(f"\nrank {rank} {{\n")
        file.writelines(f"{line}\n" for line in self._operations + self._requires)
        file.write("}\n")

    def _messages(self, graph: Graph, t: int, T: int, ready: list[str]) -> list[str]:
        """What the step has to wait for."""
        if t + self._traffic.own_lag < T:
            self._post(graph, t, ready)
        return [*ready, *self._needed(t)]

    def _post(self, graph: Graph, t: int, ready: list[str]) -> None:
        """Send and receive. Messages leave after each other, and all arrive with the last one."""
        tag, link, share = TAGS * t + MESSAGES, self._d.message.link, self._share(graph, self._g, t)
        free = [*ready, *self._link[-1:]]
        self._link.append(self._calc(link, free))
        begun = [self._calc(link - share, free)]
        peers = graph.peers(self._g, t, self._P)
        sent = [self._send(g * self._K + self._j, share, tag, begun) for g in peers]
        if not sent:  # to nobody in this step, and yet as long
            sent = [self._calc(share + self._d.message.latency, begun)]
        self._sent.append(sent)
        come = senders(graph, self._g, t, self._P)
        self._received.append(
            [self._receive(g * self._K + self._j, self._share(graph, g, t), tag) for g in come]
        )

    def _needed(self, t: int) -> Iterator[str]:
        lag, own = self._traffic.lag, t - self._traffic.own_lag
        if own >= 0:
            yield from self._sent[own]
        if lag is not None and t >= lag:
            yield from self._received[t - lag]

    def _share(self, graph: Graph, sender: int, t: int) -> float:
        """Seconds of the link for each of the messages of a group."""
        return self._d.message.link / max(len(graph.peers(sender, t, self._P)), 1)

    def _together(self, ranks: Sequence[int], seconds: float, tag: int, done: list[str]) -> list[str]:
        """All of `ranks` meet for so long."""
        p = len(ranks)
        if p == 1:
            return [self._calc(seconds, done)]
        rounds = (p - 1).bit_length()
        own = ranks.index(self._g * self._K + self._j)
        carried = seconds / rounds - self._d.message.latency
        if carried < 0:
            raise UserError(
                f"{count_text(p, 'rank')} meet for {seconds:g} s, in {count_text(rounds, 'round')} of "
                "messages of at least "
                f"{self._d.message.latency:g} s (latency_seconds): there is no schedule of that"
            )
        for k in range(rounds):
            hop = 1 << k
            sent = self._send(ranks[(own + hop) % p], carried, tag + k, done)
            done = [sent, self._receive(ranks[(own - hop) % p], carried, tag + k)]
        return done

    def _calc(self, seconds: float, after: Iterable[str]) -> str:
        return self._operation(f"calc {round(seconds * NANO)}", after)

    def _send(self, to: int, seconds: float, tag: int, after: Iterable[str]) -> str:
        return self._operation(f"send {round(seconds * NANO)}b to {to} tag {tag}", after)

    def _receive(self, source: int, seconds: float, tag: int) -> str:
        return self._operation(f"recv {round(seconds * NANO)}b from {source} tag {tag}", [])

    def _operation(self, text: str, after: Iterable[str]) -> str:
        label = f"l{len(self._operations) + 1}"
        self._operations.append(f"{label}: {text}")
        self._requires += [f"{label} requires {other}" for other in after]
        return label
