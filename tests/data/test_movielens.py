from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from data.originals import ratings, write_movielens
from hpcsgd.data import convert
from hpcsgd.data.formats import movielens
from hpcsgd.data.interactions import OTHERS
from hpcsgd.errors import UserError

ROWS = ratings()


def content(path: Path) -> dict[str, list[list[int]]]:
    with h5py.File(path, locking=False) as file:
        return {name: np.asarray(file[name]).tolist() for name in ("train/x", "test/x", "users", "items")}


@pytest.mark.parametrize("name", ["u.data", "ratings.dat", "ratings.csv"])
def test_every_form_gives_the_same_store(tmp_path: Path, name: str) -> None:
    for form in ("u.data", name):
        convert("movielens", write_movielens(tmp_path / form, ROWS, form), tmp_path / f"{form}.h5")
    assert content(tmp_path / f"{name}.h5") == content(tmp_path / "u.data.h5")
    given = movielens.read(tmp_path / name / name)
    assert list(zip(given.users, given.items, given.times, strict=True)) == [(u, i, t) for u, i, _, t in ROWS]


def test_the_latest_of_each_user_is_held_out(tmp_path: Path) -> None:
    tied = [(u, i, r, 10**6 if u == 3 else t) for u, i, r, t in ROWS]  # of equal times, the last line counts
    write_movielens(tmp_path / "ml", tied)
    summary = convert("movielens", tmp_path / "ml", tmp_path / "store.h5")
    train, test, users, items = content(tmp_path / "store.h5").values()
    latest: dict[int, tuple[int, int]] = {}
    for user, item, _, time in tied:
        if user not in latest or time >= latest[user][1]:
            latest[user] = item, time
    counts = {user: sum(row[0] == user for row in tied) for user in latest}
    expected = {(u, latest[u][0]) for u, count in counts.items() if count > 1}
    held_out = {(users[row[0]], items[row[1]]) for row in test}
    assert held_out == expected
    assert len(test) == len(expected) == 12
    rest = [(users[u], items[i]) for u, i in train]
    assert rest == [(u, i) for u, i, *_ in tied if (u, i) not in expected]
    assert summary.rows == {"train": len(rest), "test": 12}
    assert f"{len(counts)} users, 160 items" in str(summary)


def test_the_last_user_has_a_rating_held_out_too(tmp_path: Path) -> None:
    rows = [(user, item, 5, item) for user in (1, 5000) for item in (1, 2)]
    rows += [(item, item, 5, 0) for item in range(3, 3 + OTHERS)]
    convert("movielens", write_movielens(tmp_path / "ml", rows), tmp_path / "store.h5")
    _, test, users, _ = content(tmp_path / "store.h5").values()
    assert [users[row[0]] for row in test] == [1, 5000]


def test_others_are_never_rated_and_all_different(tmp_path: Path) -> None:
    convert("movielens", write_movielens(tmp_path / "ml", ROWS), tmp_path / "store.h5")
    _, test, users, items = content(tmp_path / "store.h5").values()
    rated = {(u, i) for u, i, *_ in ROWS}
    for user, _, *others in test:
        assert len(set(others)) == len(others) == OTHERS
        assert not {(users[user], items[other]) for other in others} & rated
    drawn = [tuple(others) for _, _, *others in test]
    assert len(set(drawn)) == len(drawn)
    assert set().union(*drawn) == set(range(160))


def test_one_item_less_than_needed(tmp_path: Path) -> None:
    rows = [(1, item, 5, item) for item in range(20)]
    rows += [(item, item, 5, 0) for item in range(20, 20 + OTHERS - 1)]
    write_movielens(tmp_path, rows)
    with pytest.raises(UserError, match=r"u\.data: user 1 has rated 20 of 118 items: to test on, 99 others"):
        convert("movielens", tmp_path, tmp_path / "store.h5")
    write_movielens(tmp_path, [*rows, (3, 1000, 5, 0)])
    convert("movielens", tmp_path, tmp_path / "store.h5")


def test_nobody_rates_twice(tmp_path: Path) -> None:
    write_movielens(tmp_path, [(user, 7, 5, 0) for user in range(5)])
    with pytest.raises(UserError, match=r"u\.data: no user has two ratings"):
        convert("movielens", tmp_path, tmp_path / "store.h5")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("u.data", "1\t2\t3", r"u\.data: line 3: expected user, item, rating and time, not '1 | 2 | 3'"),
        ("u.data", "1\t2\tx\t4", r"u\.data: line 3: expected user"),
        ("u.data", "1\t2.5\t3\t4", r"u\.data: line 3: expected user"),
        ("u.data", "", r"u\.data: line 3: expected user, item, rating and time, not ''"),
        ("u.data", "1\t99999999999999999999\t3\t4", r"u\.data: line 3: expected user"),
        ("ratings.dat", "1:2:3:4", r"ratings\.dat: line 3: expected user"),
        ("ratings.csv", "1;2;3;4", r"ratings\.csv: line 4: expected user"),
        ("ratings.csv", "2,20,3,4", r"ratings\.csv: line 4: user 2 has rated item 20 before"),
        ("u.data", "2\t20\t3\t4", r"u\.data: line 3: user 2 has rated item 20 before"),
    ],
)
def test_a_malformed_line(tmp_path: Path, name: str, line: str, message: str) -> None:
    path = write_movielens(tmp_path, [(1, 10, 5, 0), (2, 20, 5, 0)], name) / name
    path.write_text(
        path.read_text() + line + "\n" + path.read_text().splitlines()[-1].replace("20", "30") + "\n"
    )
    with pytest.raises(UserError, match=message):
        movielens.read(tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"expected one of u\.data, ratings\.dat, ratings\.csv, or the folder"
    ):
        movielens.read(tmp_path)
    (tmp_path / "u.data").write_text("")
    with pytest.raises(UserError, match=r"u\.data: no ratings in it"):
        movielens.read(tmp_path)
    (tmp_path / "other").write_text("1\t2\t3\t4")
    with pytest.raises(UserError, match=r"other: expected one of u\.data"):
        movielens.read(tmp_path / "other")
    csv = tmp_path / "csv"
    csv.mkdir()
    (csv / "ratings.csv").write_text("user,item,rating,time\n1,2,3,4\n")
    with pytest.raises(UserError, match=r"ratings\.csv: line 1: expected 'userId,movieId,rating,timestamp'"):
        movielens.read(csv)
    (csv / "ratings.csv").write_text("userId,movieId,rating,timestamp\r\n")
    with pytest.raises(UserError, match=r"ratings\.csv: no ratings in it"):
        movielens.read(csv)
    (csv / "u.data").write_text("1\t2\t3\t4")
    with pytest.raises(UserError, match=r"csv: expected one of"):
        movielens.read(csv)
    with pytest.raises(UserError, match=r"no source given: the folder with u\.data or"):
        movielens.read(None)
