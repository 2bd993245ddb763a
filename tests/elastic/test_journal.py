"""Terms of coordinators: however their reads and writes interleave, no two announce different trainings."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path

import pytest

from hpcsgd.elastic.journal import FileJournal, Superseded, TermJournal, claim, last_claimed, newest
from hpcsgd.elastic.register import Member, Phase, Point, Register

ROUND = Register(
    1, 7, 7, Phase.RUN, (Member(0, ("a:1", "b:2"), 7, late=True),), Point(70, 1, 0), Point(), (0,)
)


def committed(now: Register) -> Register:
    return replace(now, rounds=now.rounds + 1)


def begun(terms: Path, number: int) -> TermJournal:
    assert claim(terms, number)
    return TermJournal(terms, number)


def test_a_term_is_claimed_once(tmp_path: Path) -> None:
    terms = tmp_path / "coordinators"
    assert last_claimed(terms) == 0
    assert [claim(terms, 1), claim(terms, 1), claim(terms, 2)] == [True, False, True]
    assert last_claimed(terms) == 2


def test_the_newest_register_counts_whichever_term_has_it(tmp_path: Path) -> None:
    assert newest(tmp_path) == Register()
    first = begun(tmp_path, 1)
    assert first.load() == Register()
    first.write(ROUND)
    second = begun(tmp_path, 2)
    assert second.load() == ROUND == newest(tmp_path)
    third = begun(tmp_path, 3)
    assert third.load() == ROUND, "the second one has written nothing"
    later = replace(committed(ROUND), leaving=True, going=(0,))
    third.write(later)
    assert newest(tmp_path) == later
    assert begun(tmp_path, 4).load() == replace(later, leaving=False), "who had to stop then has stopped"


def test_one_file_for_coordinators_in_turn(tmp_path: Path) -> None:
    at = FileJournal(tmp_path / "register.json")
    assert at.load() == Register()
    at.write(ROUND)
    assert FileJournal(tmp_path / "register.json").load() == ROUND


BEFORE, BETWEEN, AFTER = range(3)
"""The moments of a coordinator that writes: before it writes, before it looks, and after it has announced."""
ORDERS = list(combinations_with_replacement((BEFORE, BETWEEN, AFTER), 2))


@pytest.mark.parametrize(("claims", "reads"), ORDERS)
def test_the_next_one_knows_what_was_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: int, reads: int
) -> None:
    first, known = begun(tmp_path, 1), Register()

    def happens(moment: int) -> None:
        nonlocal known
        if moment == claims:
            assert claim(tmp_path, 2)
        if moment == reads:
            known = TermJournal(tmp_path, 2).load()

    def put(term: TermJournal, now: Register) -> None:
        happens(BEFORE)
        really(term, now)
        happens(BETWEEN)

    really = TermJournal._put
    monkeypatch.setattr(TermJournal, "_put", put)
    try:
        first.write(ROUND)
        told = True
    except Superseded:
        told = False
    happens(AFTER)
    assert told == (claims == AFTER)
    assert known == ROUND or not told


@pytest.mark.usefixtures("forgetful")
def test_what_nfs_remembers_is_not_believed(tmp_path: Path) -> None:
    """Another node writes, and makes the next term, after this one has looked."""
    first = begun(tmp_path, 1)
    assert newest(tmp_path) == Register()
    (tmp_path / "1" / "register.json").write_bytes(json.dumps(ROUND.to_json()).encode())
    assert newest(tmp_path) == ROUND
    first.require_current()
    os.mkdir(tmp_path / "2")
    with pytest.raises(Superseded):
        first.require_current()


def coordinator(terms: Path, told: list[int]) -> Iterator[None]:
    """Run two rounds of a coordinator; it yields wherever another coordinator may run."""
    number = last_claimed(terms) + 1
    yield
    if not claim(terms, number):
        return
    yield
    term = TermJournal(terms, number)
    now = term.load()
    for _ in range(2):
        yield
        now = committed(now)
        term._put(now)
        yield
        try:
            term.require_current()
        except Superseded:
            return
        told.append(now.rounds)


def reported_in(terms: Path, many: int, draw: Callable[[int], int]) -> list[int]:
    """Return the rounds that `many` coordinators announced; `draw` chooses which of them runs next."""
    terms.mkdir()
    told: list[int] = []
    at_work = [coordinator(terms, told) for _ in range(many)]
    while at_work:
        choice = draw(len(at_work))
        if next(at_work[choice], "over") == "over":
            del at_work[choice]
    shutil.rmtree(terms)
    return told


@pytest.mark.slow
def test_in_every_order_of_two_no_round_is_reported_twice(tmp_path: Path) -> None:
    """Two coordinators that announced the same round would have announced different models."""
    orders = list(product((0, 1), repeat=11))
    for order in orders:
        turns = iter(order)
        told = reported_in(tmp_path / "terms", 2, lambda there, turns=turns: min(next(turns, 0), there - 1))
        assert told == sorted(set(told)), order


@pytest.mark.slow
def test_in_many_orders_of_three_no_round_is_reported_twice(tmp_path: Path) -> None:
    for seed in range(300):
        told = reported_in(tmp_path / "terms", 3, random.Random(seed).randrange)
        assert told == sorted(set(told)), seed
