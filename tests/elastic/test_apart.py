"""Groups that are started separately: each begins by itself, and their coordinator may move."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from elastic.conftest import TOKEN, Desk, wait_for
from hpcsgd.elastic.client import Client
from hpcsgd.elastic.coordinator_address import CoordinatorAddress
from hpcsgd.elastic.handshake import CHALLENGE, PROOF
from hpcsgd.elastic.journal import claim, newest
from hpcsgd.elastic.membership import Membership
from hpcsgd.elastic.register import Phase, Point, Vote
from in_parallel import at_once

STOPS = Vote(leaving=True)


def membership(*which: int) -> Membership:
    """Return a membership of these groups, each with one rank."""
    found = Membership(frozenset(), together=False)
    for replica_group in which:
        found.come(replica_group, 0, 1, f"{replica_group}", found.register.rounds)
    return found


def vote(members: Membership, **ballots: Vote) -> None:
    now = members.register
    for replica_group in now.replica_groups:
        ballot = ballots.get(f"i{replica_group}", Vote())
        members.vote(replica_group, 0, now.generation, now.rounds, ballot)


def come(members: Membership, *which: int) -> None:
    for replica_group in which:
        members.come(replica_group, 0, 1, f"{replica_group}", members.register.rounds)


def test_the_first_waits_for_nobody_and_the_next_come_in_at_rounds() -> None:
    members = membership(4)
    assert (members.register.phase, members.register.replica_groups) == (Phase.RUN, (4,))
    come(members, 1)
    assert members.register.replica_groups == (4,)
    vote(members)
    assert members.register.phase is Phase.OPEN
    come(members, 4)
    assert members.register.replica_groups == (1, 4)


def test_who_has_to_stop_goes_alone() -> None:
    members = membership(0)
    come(members, 1)
    vote(members)
    come(members, 0)
    vote(members, i1=STOPS)
    now = members.register
    assert (now.phase, now.going, now.leaving) == (Phase.RUN, (1,), False)
    assert [now.stops(replica_group) for replica_group in (0, 1)] == [False, True]
    members.lose(1)
    come(members, 0)
    vote(members, i0=Vote(Point(5)))
    assert (members.register.replica_groups, members.register.going, members.register.place.t) == (
        (0,),
        (),
        5,
    )


def test_who_has_to_stop_gets_no_samples() -> None:
    members = membership(0)
    come(members, 1)
    vote(members)
    come(members, 0)
    following = Point(4, epoch=1)
    vote(members, i0=Vote(following), i1=Vote(following, leaving=True))
    assert (members.register.assigned_at, members.register.sharing) == (following, (0,))
    members.lose(1)
    come(members, 0)
    vote(members, i0=Vote(Point(8, epoch=2), leaving=True))
    assert members.register.sharing == (0,), "nobody else is there"


def voting(client: Client, ballot: Vote = Vote()):  # noqa: B008 - frozen
    now = client.register
    return lambda: client.vote(now.generation, now.rounds, ballot)


def test_clients_find_the_next_coordinator_and_the_last_one_says_nothing_more(desk: Desk) -> None:
    folder = str(desk.folder.resolve())
    with desk.coordinator(2, term=1) as first:
        client = desk.client(folder, 0)
        client.come("nowhere:1", 0)
        voting(client)()
        with desk.coordinator(2, term=2) as second:
            assert second.register.rounds == 1
            wait_for(lambda: first.superseded)
            assert voting(client)().rounds == 2
            assert first.register.rounds == 1
            assert newest(desk.folder).rounds == 2
            desk.leave()


def test_a_port_that_somebody_else_has_now_is_that_of_one_that_has_left(desk: Desk) -> None:
    folder = str(desk.folder.resolve())
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        assert claim(desk.folder, 1)
        CoordinatorAddress("{}:{}".format(*stranger.getsockname()), TOKEN).publish(desk.folder, 1)
        with ThreadPoolExecutor(1) as pool:
            client = pool.submit(desk.client, folder, 0)
            connection, _ = stranger.accept()
            connection.sendall(bytes(CHALLENGE + PROOF))
            with desk.coordinator(1, term=2):
                client.result(60).come("nowhere:1", 0)
                desk.leave()
            connection.close()


def test_who_left_is_no_loss_to_the_next_coordinator(desk: Desk) -> None:
    folder = str(desk.folder.resolve())
    with desk.coordinator(2, term=1) as at:
        staying, leaving = desk.client(folder, 0), desk.client(folder, 1)
        staying.come("nowhere:1", 0)
        with ThreadPoolExecutor(1) as pool:
            arrived = pool.submit(leaving.come, "nowhere:1", 0)
            while 1 not in at.membership.expected:
                voting(staying)()
            assert staying.come("nowhere:1", staying.register.rounds).replica_groups == (0, 1)
            arrived.result(60)
        at_once(voting(staying), voting(leaving, STOPS))
        assert at.register.going == (1,)
        with desk.coordinator(2, term=2) as second:
            wait_for(lambda: second.register.phase is Phase.OPEN)
            assert second.membership.expected == {0}
            assert staying.come("nowhere:1", 2).replica_groups == (0,)
            desk.leave()


def test_the_one_that_left_is_reported_as_such(desk: Desk) -> None:
    folder = str(desk.folder.resolve())
    with desk.coordinator(1, term=1):
        client = desk.client(folder, 0)
        client.come("nowhere:1", 0)
        voting(client, STOPS)()
        desk.leave()
        wait_for(lambda: any(event["event"] == "lost" for event in desk.events()))
    (lost,) = (event for event in desk.events() if event["event"] == "lost")
    assert (lost["kind"], lost["why"]) == ("left", "it had to stop")
