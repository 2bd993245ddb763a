"""The register under every order of events: groups come, vote, object, die and freeze."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcsgd.elastic.membership import Membership
from hpcsgd.elastic.register import Phase, Point, Register, Vote

RANKS = (2, 1, 3)
"""The number of ranks of each group."""
NOTHING = Vote()
CLIENTS = [(replica_group, rank) for replica_group, ranks in enumerate(RANKS) for rank in range(ranks)]
clients = st.sampled_from(CLIENTS)
replica_groups = st.sampled_from(range(len(RANKS)))


def come(membership: Membership, replica_group: int, rounds: int = 0, *, brings: bool = False) -> None:
    ranks = RANKS[replica_group]
    for rank in range(ranks):
        membership.come(replica_group, rank, ranks, f"{replica_group}.{rank}", rounds, brings=brings)


def vote(membership: Membership, replica_group: int, ballot: Vote = NOTHING) -> None:
    now = membership.register
    for rank in range(RANKS[replica_group]):
        membership.vote(replica_group, rank, now.generation, now.rounds, ballot)


def running(*which: int) -> Membership:
    membership = Membership(frozenset(which))
    for replica_group in which:
        come(membership, replica_group)
    return membership


def test_the_register_closes_when_all_have_come() -> None:
    membership = Membership(frozenset({0, 1}))
    come(membership, 1)
    assert membership.register == Register()
    come(membership, 0)
    now = membership.register
    assert (now.generation, now.rounds, now.phase, now.replica_groups) == (1, 0, Phase.RUN, (0, 1))
    assert now.members[0].addresses == ("0.0", "0.1")


def test_a_round_is_committed_by_the_last_client() -> None:
    membership = running(0, 1)
    vote(membership, 0)
    assert membership.register.rounds == 0
    vote(membership, 0)  # a second vote does not count
    assert membership.register.rounds == 0
    vote(membership, 1)
    assert (membership.register.rounds, membership.register.generation) == (1, 1)


def test_votes_of_the_past_do_not_count() -> None:
    membership = running(0, 1)
    before = membership.register
    vote(membership, 0)
    membership.object(1, 1, 0)
    assert membership.register.phase is Phase.OPEN
    come(membership, 0)
    come(membership, 1)
    assert membership.register.generation == 2
    for replica_group, rank in ((0, 0), (0, 1), (1, 0)):
        membership.vote(replica_group, rank, before.generation, before.rounds, NOTHING)
    assert membership.register.rounds == 0
    vote(membership, 1)
    assert membership.register.rounds == 0, "the votes of before the objection are void"


def test_one_survivor_goes_on() -> None:
    membership = running(0, 1, 2)
    membership.lose(0)
    membership.lose(2)
    come(membership, 1)
    assert membership.register.replica_groups == (1,)
    vote(membership, 1)
    assert membership.register.rounds == 1


def test_whoever_returns_is_in_after_the_round() -> None:
    membership = running(0, 1, 2)
    membership.lose(2)
    come(membership, 0)
    come(membership, 1)
    come(membership, 2)
    assert membership.register.replica_groups == (0, 1)
    vote(membership, 0)
    vote(membership, 1)
    now = membership.register
    assert (now.phase, now.rounds) == (Phase.OPEN, 1), "open to the one who waits"
    come(membership, 0, 1)
    come(membership, 1, 1)
    now = membership.register
    assert (now.replica_groups, now.rounds) == ((0, 1, 2), 1)
    assert [member.rounds for member in now.members] == [1, 1, 0]


def test_who_has_half_come_is_not_forgotten() -> None:
    """One of its ranks comes while the register closes on other groups, and the second rank comes later."""
    membership = Membership(frozenset({1}))
    membership.come(0, 0, RANKS[0], "0.0", 0)
    come(membership, 1)
    assert membership.register.replica_groups == (1,)
    membership.come(0, 1, RANKS[0], "0.1", 0)
    vote(membership, 1)
    come(membership, 1, 1)
    assert membership.register.replica_groups == (0, 1)


def test_the_frozen_are_not_waited_for() -> None:
    membership = running(0, 1)
    membership.object(0, 1, 0)
    come(membership, 0)
    assert membership.register.phase is Phase.OPEN
    membership.wait_no_longer()
    assert membership.register.replica_groups == (0,)
    membership.vote(1, 0, 1, 0, NOTHING)
    assert membership.register.rounds == 0


def test_samples_are_assigned_to_those_that_make_the_round() -> None:
    membership = running(0, 1)
    begins, later = Vote(Point(0, 0, 0)), Vote(Point(7, 0, 0))
    vote(membership, 0, begins)
    vote(membership, 1, begins)
    assert membership.register.sharing == (0, 1)
    come(membership, 2)
    vote(membership, 0, later)
    vote(membership, 1, later)
    come(membership, 0, 2)
    come(membership, 1, 2)
    now = membership.register
    assert (now.replica_groups, now.counting, now.sharing) == ((0, 1, 2), (0, 1), (0, 1))
    vote(membership, 2, Vote(Point(99, 5, 0)))
    for replica_group in (0, 1):
        vote(membership, replica_group, Vote(Point(9, 0, 0)))
    now = membership.register
    assert (now.place.t, now.counting, now.assigned_at.t) == (9, (0, 1), 0), "who looks on never counts"
    for replica_group in (0, 1, 2):
        vote(membership, replica_group, Vote(Point(14, 1, 0), leaving=replica_group == 2))
    now = membership.register
    assert (now.sharing, now.assigned_at, now.leaving) == ((0, 1, 2), Point(14, 1, 0), True)
    membership.lose(0)
    membership.lose(1)
    come(membership, 2, now.rounds)
    assert membership.register.counting == (2,)


def test_where_nobody_is_left_of_those_with_samples_all_count() -> None:
    membership = running(0)
    vote(membership, 0, Vote(Point(0, 0, 0)))
    come(membership, 1)
    vote(membership, 0, Vote(Point(3, 0, 0)))
    come(membership, 0, 2)
    vote(membership, 0, Vote(Point(6, 0, 0)))
    vote(membership, 1)
    membership.lose(0)
    come(membership, 1, 3)
    assert membership.register.counting == (1,)


def test_samples_are_assigned_again_where_those_that_have_them_left_before_a_round() -> None:
    """The last group restarts from the position at which they were assigned, and has used none itself."""
    membership, begins = running(0), Vote(Point(50, 1, 0))
    vote(membership, 0, begins)
    come(membership, 1)
    membership.lose(0)
    assert membership.register.replica_groups == (1,)
    vote(membership, 1, begins)
    now = membership.register
    assert (now.assigned_at, now.sharing) == (begins.place, (1,))


def away(missed: int, *, late_rounds: int) -> Membership:
    """Return three groups, of which the first one has asked to return after it has missed some rounds."""
    membership = Membership(frozenset({0, 1, 2}), late_rounds=late_rounds)
    for replica_group in (0, 1, 2):
        come(membership, replica_group)
    for replica_group in (0, 1, 2):
        vote(membership, replica_group, Vote(Point(3, 0, 0)))
    membership.lose(0)
    for replica_group in (1, 2):
        come(membership, replica_group, 1)
    for n in range(1, missed + 1):
        if n == missed:
            come(membership, 0, 1, brings=True)
        for replica_group in (1, 2):
            vote(membership, replica_group, Vote(Point(3 + n, 0, 0)))
    assert (membership.register.phase, membership.register.rounds) == (Phase.OPEN, 1 + missed)
    return membership


def test_late_work_counts_once_if_few_rounds_were_missed() -> None:
    for missed, late_rounds, counts in (
        (1, 1, True),
        (2, 2, True),
        (2, 1, False),
        (3, 2, False),
        (1, 0, False),
    ):
        membership = away(missed, late_rounds=late_rounds)
        for replica_group in (1, 2):
            come(membership, replica_group, 1 + missed)
        now = membership.register
        assert (now.counting, now.late) == (((0, 1, 2), (0,)) if counts else ((1, 2), ()))
        assert now.up_to_date == (1, 2)
        for replica_group in (0, 1, 2):
            vote(membership, replica_group, Vote(Point(99 if replica_group == 0 else 9, 0, 0)))
        now = membership.register
        assert (now.place.t, now.late, now.counting) == (9, (), (0, 1, 2)), "the late one was not at step 9"


def test_late_work_counts_though_samples_were_assigned_meanwhile() -> None:
    """In later rounds the group does not count before it has samples again."""
    membership = away(2, late_rounds=2)
    membership.register = replace(membership.register, sharing=(1, 2))
    for replica_group in (1, 2):
        come(membership, replica_group, 3)
    assert membership.register.counting == (0, 1, 2)
    for replica_group in (0, 1, 2):
        vote(membership, replica_group, Vote(Point(9, 0, 0)))
    assert membership.register.counting == (1, 2)


def test_late_groups_count_only_if_all_their_ranks_bring_something() -> None:
    membership = away(1, late_rounds=5)
    membership.come(0, 0, 2, "0.0", 1, brings=False)
    for replica_group in (1, 2):
        come(membership, replica_group, 2)
    assert membership.register.counting == (1, 2)


def test_if_only_late_groups_are_left_the_newest_counts_as_up_to_date() -> None:
    membership = away(2, late_rounds=5)
    membership.lose(1)
    membership.lose(2)
    now = membership.register
    assert (now.replica_groups, now.rounds, now.counting, now.late) == ((0,), 3, (0,), ())


def test_who_was_left_out_does_not_come_back_before_a_round_is_made() -> None:
    membership = running(0, 1)
    for without in (1, 2):
        membership.leave_out(1)
        come(membership, 1)
        come(membership, 0, membership.register.rounds)
        assert membership.register.replica_groups == (0,)
        for _ in range(without):
            assert membership.register.phase is Phase.RUN
            vote(membership, 0)
        assert membership.register.phase is Phase.OPEN
        come(membership, 0, membership.register.rounds)
        assert membership.register.replica_groups == (0, 1)


def test_who_was_left_out_comes_back_where_nobody_else_lives() -> None:
    membership = running(0, 1)
    membership.leave_out(1)
    membership.lose(0)
    come(membership, 1)
    membership.wait_no_longer()
    assert membership.register.replica_groups == (1,)


def without_the_third(*, sharing: tuple[int, ...] = (0, 1, 2)) -> Membership:
    """Return an open register: after a round of three groups the third one died, and is back at once."""
    membership = running(0, 1, 2)
    for replica_group in (0, 1, 2):
        vote(membership, replica_group, Vote(Point(3, 0, 0)))
    membership.register = replace(membership.register, sharing=sharing)
    membership.lose(2)
    come(membership, 2)
    return membership


def test_a_register_does_not_close_on_older_means_than_those_of_groups_that_train() -> None:
    membership = without_the_third()
    assert membership.ready() == frozenset()
    membership.wait_no_longer()
    assert membership.register.phase is Phase.OPEN
    come(membership, 0, 1)
    assert membership.ready() == {0}
    membership.wait_no_longer()
    now = membership.register
    assert (now.replica_groups, now.up_to_date) == ((0, 2), (0,))


def test_a_register_does_not_close_without_the_groups_that_have_samples() -> None:
    membership = without_the_third(sharing=(1,))
    come(membership, 0, 1)
    assert membership.ready() == frozenset(), "group 0 looks on"
    membership.lose(1)
    assert membership.register.up_to_date == (0,)


def test_a_group_that_moves_has_no_mean_when_it_is_back() -> None:
    membership = running(0, 1)
    for replica_group in (0, 1):
        vote(membership, replica_group)
    for replica_group in (0, 1):
        membership.expect(replica_group)
    assert membership.ready() == frozenset()
    come(membership, 0)
    assert membership.ready() == {0}, "group 1 may never come back"


def test_nothing_moves_a_finished_register() -> None:
    membership = running(0, 1)
    membership.finish(0, 1)
    finished = membership.register
    come(membership, 1)
    vote(membership, 1)
    membership.lose(0)
    membership.wait_no_longer()
    assert membership.register == finished


def test_the_register_survives_as_json() -> None:
    now = running(0, 2).register
    assert Register.from_json(json.loads(json.dumps(now.to_json()))) == now


class Groups(RuleBasedStateMachine):
    """Each client remembers what a real one would: the round whose mean it holds."""

    @initialize()
    def begin(self) -> None:
        self.membership = Membership(frozenset(range(len(RANKS))))
        self.held = dict.fromkeys(CLIENTS, 0)
        self.voted: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.dead: set[int] = set()
        self.seen = self.membership.register

    def after(self) -> None:
        """Check that one event made only an allowed change."""
        before, now = self.seen, self.membership.register
        assert now.generation in (before.generation, before.generation + 1)
        if now.rounds == before.rounds + 1 and now.generation == before.generation:
            voters = self.voted[before.generation, before.rounds]
            wanted = {client for client in CLIENTS if client[0] in before.replica_groups}
            assert voters >= wanted, "committed without all votes"
        else:
            assert now.rounds == before.rounds, "rounds are only made by commits"
        self.seen = now

    def is_in(self, replica_group: int) -> bool:
        now = self.membership.register
        return now.phase is Phase.RUN and replica_group in now.replica_groups

    @rule(client=clients)
    def comes(self, client: tuple[int, int]) -> None:
        replica_group, rank = client
        if self.is_in(replica_group):
            return
        self.dead.discard(replica_group)
        self.membership.come(
            replica_group, rank, RANKS[replica_group], f"{replica_group}.{rank}", self.held[client]
        )
        self.after()

    @rule(client=clients)
    def votes(self, client: tuple[int, int]) -> None:
        now = self.membership.register
        self.voted.setdefault((now.generation, now.rounds), set()).add(client)
        self.membership.vote(*client, now.generation, now.rounds, NOTHING)
        self.after()
        if self.membership.register.rounds > now.rounds:
            self.held |= {s: now.rounds + 1 for s in CLIENTS if s[0] in now.replica_groups}

    @rule(client=clients, ago=st.integers(0, 1))
    def objects(self, client: tuple[int, int], ago: int) -> None:
        now = self.membership.register
        self.membership.object(client[0], now.generation - ago, now.rounds)
        self.after()

    @rule(replica_group=replica_groups)
    def dies(self, replica_group: int) -> None:
        self.dead.add(replica_group)
        self.membership.lose(replica_group)
        self.after()

    @rule()
    def time_passes(self) -> None:
        self.membership.wait_no_longer()
        self.after()

    @precondition(lambda self: len(self.dead) < len(RANKS))
    @rule()
    def all_who_live_come_and_vote(self) -> None:
        """From any state, the living groups can complete a round by themselves."""
        living = [replica_group for replica_group in range(len(RANKS)) if replica_group not in self.dead]
        for _ in range(3):
            if self.membership.register.phase is Phase.OPEN:
                for replica_group in living:
                    if not self.is_in(replica_group):  # the earlier ones may have completed the generation
                        come(self.membership, replica_group, self.held[replica_group, 0])
                self.membership.wait_no_longer()
            self.seen = now = self.membership.register
            for replica_group in living:
                for rank in range(RANKS[replica_group]):
                    self.votes((replica_group, rank))
            if self.membership.register.rounds > now.rounds:
                return
            for replica_group in set(now.replica_groups) & set(self.dead):
                self.membership.lose(replica_group)
            self.membership.object(living[0], now.generation, now.rounds)
            self.seen = self.membership.register
        raise AssertionError("no round in three attempts")

    @invariant()
    def members_have_distinct_groups(self) -> None:
        if hasattr(self, "membership"):
            members = self.membership.register.replica_groups
            assert len(set(members)) == len(members)


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
