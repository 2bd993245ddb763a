"""Clients of a coordinator, with real connections."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest

from elastic.conftest import HEARTBEAT_TIMEOUT, TOKEN, Desk, wait_for
from hpcsgd.comm import PeerLost
from hpcsgd.elastic.client import Client, Evicted
from hpcsgd.elastic.coordinator import Coordinator
from hpcsgd.elastic.handshake import CHALLENGE, PROOF, Unauthenticated
from hpcsgd.elastic.register import Phase, Point, Register, Vote
from hpcsgd.elastic.resource_budget import ResourceBudget
from in_parallel import at_once

NOTHING = Vote()


def come(*clients: Client, rounds: int = 0) -> Register:
    registers = at_once(*(lambda client=client: client.come("nowhere:1", rounds) for client in clients))
    assert len(set(registers)) == 1
    return registers[0]


def vote(client: Client, now: Register, ballot: Vote = NOTHING) -> Register:
    return client.vote(now.generation, now.rounds, ballot, progress=0.0)


def assert_left_behind(client: Client, before: Register, why: str) -> None:
    """Check that the client is evicted because of `why`, or finds that the others have gone on without it."""
    try:
        after = vote(client, before)
        assert after.phase is Phase.OPEN or client._hello["replica_group"] not in after.replica_groups
    except Evicted as told:
        assert str(told) == why  # noqa: PT017 - it need not be raised


def later(call) -> Future:
    future: Future = Future()
    threading.Thread(target=lambda: future.set_result(call()), daemon=True).start()
    return future


def test_rounds_go_by(desk: Desk) -> None:
    with desk.coordinator(2) as at:
        clients = [
            desk.client(at.address, 0, 0, 2),
            desk.client(at.address, 0, 1, 2),
            desk.client(at.address, 1),
        ]
        now = come(*clients)
        assert now.replica_groups == (0, 1)
        for rounds in (1, 2, 3):
            (now,) = set(at_once(*(lambda client=client, now=now: vote(client, now) for client in clients)))
            assert (now.generation, now.rounds, now.phase) == (1, rounds, Phase.RUN)
        clients[0].finish(now.generation)
        wait_for(lambda: clients[2].register.phase is Phase.FINISHED)


def test_a_commit_tells_how_far_those_are_that_count(desk: Desk) -> None:
    """The first counting group gives the progress, in each round again."""
    with desk.coordinator(2) as at:
        clients = [desk.client(at.address, replica_group) for replica_group in (0, 1)]
        now = come(*clients)
        for progress in ((2.25, 1.75), (0.0, 0.5)):
            votes = [
                partial(client.vote, now.generation, now.rounds, NOTHING, epochs)
                for client, epochs in zip(clients, progress, strict=True)
            ]
            (now,) = set(at_once(*votes))
    commits = [event for event in desk.events() if event["event"] == "commit"]
    assert [(event["epoch"], event["fraction"]) for event in commits] == [(2, 0.25), (0, 0.5)]


def test_the_slow_get_more_when_samples_are_assigned_again(desk: Desk) -> None:
    """Each rank reports its seconds per step; the slowest rank of a group counts."""
    budget = ResourceBudget("samples", 16, min_gain=0.1, cost=0.0, epochs=10)
    with desk.coordinator(2, budget=budget) as at:
        clients = [
            desk.client(at.address, 0),
            desk.client(at.address, 1, 0, 2),
            desk.client(at.address, 1, 1, 2),
        ]
        now, found = come(*clients), []
        for place in (Point(0, 0, 0), Point(4, 1, 0)):
            votes = [
                partial(client.vote, now.generation, now.rounds, Vote(place), 0.0, pace)
                for client, pace in zip(clients, (0.1, 0.3, 0.2), strict=True)
            ]
            (now,) = set(at_once(*votes))
            found.append(now.units)
    assert found == [((0, 8), (1, 8)), ((0, 4), (1, 12))]


def test_a_broken_connection_is_noticed_at_once(desk: Desk) -> None:
    with desk.coordinator(2) as at:
        staying, leaving = desk.client(at.address, 0), desk.client(at.address, 1)
        now = come(staying, leaving)
        outcome = later(lambda: vote(staying, now))
        leaving.close()
        assert outcome.result(20).phase is Phase.OPEN
        assert come(staying).replica_groups == (0,)


def test_silent_groups_are_left_behind_and_learn_it_when_they_wake(desk: Desk) -> None:
    with desk.coordinator(2) as at:
        staying, frozen = desk.client(at.address, 0), desk.client(at.address, 1)
        now = come(staying, frozen)
        outcome = later(lambda: vote(staying, now))
        frozen._sending.acquire()  # no heartbeat is sent

        def after_long_silence() -> bool:
            for client in [client for client in at._clients if client.replica_group == 1]:
                client.heard -= HEARTBEAT_TIMEOUT
            return outcome.done()

        wait_for(after_long_silence, 60)
        assert outcome.result().phase is Phase.OPEN
        alone = come(staying)
        assert alone.replica_groups == (0,)
        frozen._sending.release()
        assert_left_behind(frozen, now, f"nothing was heard of rank 0 for {HEARTBEAT_TIMEOUT:g} s")
        back = desk.client(at.address, 1, life="first.2")
        arriving = later(lambda: back.come("nowhere:1", 0))
        wait_for(lambda: 1 in at.membership.expected)
        assert vote(staying, alone).phase is Phase.OPEN
        assert staying.come("nowhere:1", 1) == arriving.result(60)
        assert [member.rounds for member in staying.register.members] == [1, 0]


@pytest.mark.slow
def test_who_does_not_arrive_is_left_behind_though_alive(desk: Desk) -> None:
    with desk.coordinator(2, timeout=1) as at:
        staying, slow = desk.client(at.address, 0), desk.client(at.address, 1)
        now = come(staying, slow)
        staying.arrive(now.generation, now.rounds)
        assert vote(staying, now).phase is Phase.OPEN
        assert_left_behind(slow, now, "it did not arrive within 1 s")


def test_who_is_waited_for_too_long_is_left_behind(desk: Desk) -> None:
    with desk.coordinator(2) as at:
        staying, slow = desk.client(at.address, 0), desk.client(at.address, 1)
        now = come(staying, slow)
        staying.arrive(now.generation, now.rounds)
        wait_for(lambda: at._arrivals.have_begun(now))
        at._since -= 601  # seconds
        assert later(lambda: vote(staying, now)).result(20).phase is Phase.OPEN
    lost = [(event["replica_group"], event["kind"]) for event in desk.events() if event["event"] == "lost"]
    assert lost[0] == (1, "late")


def after_a_round(desk: Desk, at: Coordinator) -> list[Client]:
    """Return three clients after a round; then the third one's group dies."""
    clients = [desk.client(at.address, replica_group) for replica_group in range(3)]
    now = come(*clients)
    at_once(*(partial(vote, client, now) for client in clients))
    clients[2].close()
    wait_for(lambda: at.register.phase is Phase.OPEN)
    return clients


def long_after(at: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the coordinator look around twice, long after the last change."""
    looked, look = list[bool](), at._look_around

    def look_around() -> None:
        at._since -= 601
        look()
        looked.append(True)

    monkeypatch.setattr(at, "_look_around", look_around)
    wait_for(lambda: len(looked) > 1)
    monkeypatch.setattr(at, "_look_around", look)


def test_training_is_no_waiting(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that returns does not begin alone, nor does the first one that has trained."""
    with desk.coordinator(3) as at:
        clients = after_a_round(desk, at)
        back = desk.client(at.address, 2, life="second.1")
        returns = later(lambda: back.come("nowhere:1", 0))
        wait_for(lambda: 2 in at.membership.expected)
        long_after(at, monkeypatch)
        assert at.register.phase is Phase.OPEN
        first = later(lambda: clients[0].come("nowhere:1", 1))
        wait_for(lambda: at._arrivals._ready_since is not None)
        long_after(at, monkeypatch)
        assert at.register.phase is Phase.OPEN
        now = clients[1].come("nowhere:1", 1)
        assert (now.replica_groups, now.up_to_date) == ((0, 1, 2), (0, 1))
        assert returns.result(60) == first.result(60) == now


@pytest.mark.parametrize("quorum", [None, 1])
def test_an_open_register_closes_without_a_group_that_is_too_late(desk: Desk, quorum: int | None) -> None:
    with desk.coordinator(3, quorum=quorum, grace=math.inf if quorum is None else 4) as at:
        clients = after_a_round(desk, at)
        first = later(lambda: clients[0].come("nowhere:1", 1))
        wait_for(lambda: at._arrivals._ready_since is not None)
        if quorum is None:
            assert at._arrivals._ready_since is not None
            at._since -= 601
            at._arrivals._ready_since -= 601
        else:
            wait_for(lambda: at._arrivals._enough_since is not None)
            assert at._arrivals._enough_since is not None
            at._arrivals._enough_since -= 5
        assert first.result(60).replica_groups == (0,)


def test_of_two_that_do_not_reach_each_other_the_one_that_missed_rounds_is_cut(desk: Desk) -> None:
    with desk.coordinator(2) as at:
        clients = [desk.client(at.address, replica_group) for replica_group in (0, 1)]
        now = come(*clients)
        at_once(*(partial(vote, client, now) for client in clients))
        clients[0].close()
        wait_for(lambda: at.register.phase is Phase.OPEN)
        back = desk.client(at.address, 0, life="second.1")
        for _ in range(2):
            returns = later(lambda: back.come("nowhere:1", 0))
            wait_for(lambda: 0 in at.membership.expected)
            now = clients[1].come("nowhere:1", 1)
            assert returns.result(60).up_to_date == (1,)
            clients[1].object(now.generation, now.rounds, "a test", 0)
        assert clients[1].come("nowhere:1", 1).replica_groups == (1,)
    lost = [(event["replica_group"], event["kind"]) for event in desk.events() if event["event"] == "lost"]
    assert (0, "cut") in lost


def test_a_new_life_ends_the_old_one(desk: Desk) -> None:
    with desk.coordinator(1) as at:
        old = desk.client(at.address, 0)
        come(old)
        new = desk.client(at.address, 0, life="first.2")
        wait_for(lambda: not old._thread.is_alive())
        with pytest.raises(Evicted, match="it was started again"):
            _ = old.register
        assert come(new).generation == 2


def test_of_two_that_are_one_group_the_later_one_stays(desk: Desk) -> None:
    """The ranks of a killed launcher may still run when its next launcher starts others."""
    with desk.coordinator(1) as at:
        old = desk.client(at.address, 0)
        come(old)
        new = desk.client(at.address, 0, life="second.1")
        now = come(new)
        again = desk.client(at.address, 0, life="first.2")  # its new connection knows nothing of that
        for left in (old, again):
            wait_for(lambda left=left: not left._thread.is_alive())
            with pytest.raises(PeerLost, match="it was started again"):
                _ = left.register
        assert vote(new, now).rounds == 1


def test_who_moves_is_waited_for_and_not_lost(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although its process ends at once and its old connection may outlast it."""
    with desk.coordinator(2) as at:
        staying = desk.client(at.address, 0)
        movers = [desk.client(at.address, 1, rank, 2) for rank in (0, 1)]
        come(staying, *movers)
        expect = at.membership.expect

        def busy(replica_group: int) -> None:
            time.sleep(0.2)
            expect(replica_group)

        monkeypatch.setattr(at.membership, "expect", busy)
        movers[0].move()
        assert at.register.phase is Phase.OPEN, "heard before it leaves"
        movers[0].close()
        movers[1].move()
        back = desk.client(at.address, 1, life="first.2")
        movers[1].close()
        now = come(staying, back)
        assert [member.ranks for member in now.members] == [1, 1]
    assert "lost" not in (desk.folder / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_coordinator_that_is_started_again(desk: Desk) -> None:
    with desk.killable(2) as at:
        clients = [desk.client(at, 0), desk.client(at, 1)]
        now = come(*clients)
        (now,) = set(at_once(*(lambda client=client: vote(client, now) for client in clients)))
        half = later(lambda: vote(clients[0], now))
        time.sleep(0.2)
    assert json.loads((desk.folder / "register.json").read_text())["rounds"] == 1
    with desk.killable(2, port_of(at)):
        after = vote(clients[1], now)
        assert half.result(10) == after
        assert (after.rounds, after.generation) == (2, 1), "a vote of before is said once more"


@pytest.mark.slow
def test_members_that_a_new_coordinator_never_sees_are_lost(desk: Desk) -> None:
    with desk.killable(2) as at:
        clients = [desk.client(at, 0), desk.client(at, 1)]
        now = come(*clients)
    clients[1].close()
    with desk.killable(2, port_of(at), heartbeat_timeout=5):
        assert vote(clients[0], now).phase is Phase.OPEN
        assert come(clients[0]).replica_groups == (0,)


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


@pytest.mark.slow
def test_without_a_coordinator_nobody_waits_for_ever(desk: Desk) -> None:
    with desk.killable(1) as at:
        client = desk.client(at, 0)
        now = come(client)
        client._patience = 0.5
    with pytest.raises(PeerLost, match=r"no coordinator at 127.0.0.1:\d+"):
        while True:
            now = vote(client, now)


def test_nobody_gets_in_without_the_token(desk: Desk) -> None:
    with desk.coordinator(1) as at:
        hello = {"replica_group": 0, "rank": 0, "ranks": 1, "life": "x"}
        with pytest.raises((Unauthenticated, PeerLost)):
            Client(at.address, "guess", hello, heartbeat_timeout=1, patience=0, on_change=lambda _: None)
        host, port = at.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as stranger:
            stranger.recv(CHALLENGE)
            stranger.sendall(bytes(CHALLENGE + PROOF) + json.dumps(hello).encode() + b"\n")
            assert stranger.recv(1) == b"", "the door is closed without a word"
        assert not at._clients


def test_a_host_without_the_token_is_not_believed(desk: Desk) -> None:
    """A stranger that took over the coordinator's port learns nothing and is not obeyed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pose() -> None:
            connection, _ = listener.accept()
            connection.sendall(bytes(CHALLENGE))
            connection.recv(CHALLENGE + PROOF)
            connection.sendall(bytes(PROOF))
            connection.close()

        threading.Thread(target=pose, daemon=True).start()
        address = "{}:{}".format(*listener.getsockname())
        hello = {"replica_group": 0, "rank": 0, "ranks": 1, "life": "x"}
        with pytest.raises(Unauthenticated, match="the host of a connection does not know this job's token"):
            Client(
                address,
                TOKEN,
                hello,
                heartbeat_timeout=HEARTBEAT_TIMEOUT,
                patience=0,
                on_change=lambda _: None,
            )


def test_nonsense_ends_only_the_conversation(desk: Desk) -> None:
    with desk.coordinator(1) as at:
        good, bad = desk.client(at.address, 0), desk.client(at.address, 1)
        now = come(good)
        bad._connection.sendall(b"{nonsense\n")
        assert vote(good, now).rounds == 1


def test_who_wakes_after_its_generation_has_ended_does_not_wait_for_it(desk: Desk) -> None:
    """Two ranks of a group must agree on the generation, although only one of them saw it run."""
    with desk.coordinator(2) as at:
        first, second = desk.client(at.address, 0, 0, 2), desk.client(at.address, 0, 1, 2)
        other = desk.client(at.address, 1)
        second._news.acquire()  # receives nothing for a while
        late = later(lambda: second.come("nowhere:1", 0))
        second._news.release()
        (one, two) = at_once(lambda: first.come("nowhere:1", 0), lambda: other.come("nowhere:1", 0))
        assert one == two
        other.object(one.generation, one.rounds, "a test", None)
        assert late.result(10).generation == one.generation


@pytest.mark.slow
def test_who_was_passed_over_asks_again(desk: Desk) -> None:
    with desk.coordinator(2, timeout=1) as at:
        here, slow = desk.client(at.address, 0), desk.client(at.address, 1, 0, 2)
        half = later(lambda: slow.come("nowhere:1", 0))
        alone = here.come("nowhere:1", 0)
        assert alone.replica_groups == (0,)
        rest = later(lambda: desk.client(at.address, 1, 1, 2).come("nowhere:1", 0))
        wait_for(lambda: 1 in at.membership.expected)
        assert vote(here, alone).phase is Phase.OPEN
        together = here.come("nowhere:1", 1)
        assert together.replica_groups == (0, 1)
        assert half.result(10) == rest.result(10) == together


def test_a_request_that_is_granted_already_does_not_end_the_generation(desk: Desk) -> None:
    with desk.coordinator(2) as at:
        clients = [desk.client(at.address, replica_group) for replica_group in (0, 1)]
        now = come(*clients)
        clients[1]._send_until_answered(
            {"do": "come", "address": "nowhere:1", "rounds": 0, "generation": now.generation - 1}
        )
        after = at_once(*(lambda client=client: vote(client, now) for client in clients))
        assert {(each.phase, each.generation, each.rounds) for each in after} == {
            (Phase.RUN, now.generation, 1)
        }
        wait_for(lambda: len(desk.events()) > 1)  # a commit is written after it has been announced
        assert [event["event"] for event in desk.events()] == ["generation", "commit"]


def test_who_was_passed_over_asks_for_the_generation_after_that(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask for a generation after those heard of since, which may include its own group."""
    with desk.coordinator(2) as at:
        here, other = desk.client(at.address, 0), desk.client(at.address, 1)
        now = come(here, other)
        without = replace(now, members=now.members[1:], generation=now.generation - 2)
        heard, said = iter([without, now]), []
        monkeypatch.setattr(here, "_wait", lambda settled: next(heard))
        monkeypatch.setattr(here, "_send_until_answered", said.append)
        assert here.come("nowhere:1", 0) == now
        assert [message["generation"] for message in said] == [now.generation, without.generation]
