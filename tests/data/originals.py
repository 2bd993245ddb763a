"""Small data sets of text and of ratings in their original formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SIZES = {"train": 120, "valid": 5, "test": 30}


def write_wikitext(folder: Path, lines: dict[str, int] | None = None, seed: int = 0) -> Path:
    """Write files of WikiText and return `folder`.

    `lines` gives the number of sentences per split. They follow a small grammar; empty lines separate them.
    """
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(seed)
    words = [
        ["the", "a", "<unk>"],
        ["cat", "dog", "été"],
        ["sees", "hears"],
        ["me", "you", "them", "it"],
        ["."],
    ]
    for split, count in (lines or SIZES).items():
        text = [" " + " ".join(chance.choice(place) for place in words) + " \n \n" for _ in range(count)]
        (folder / f"wiki.{split}.tokens").write_text("".join(text), encoding="utf-8")
    return folder


def ratings(
    users: int = 12, items: int = 160, each: int = 9, seed: int = 0
) -> list[tuple[int, int, int, int]]:
    """Return rows of user, item, rating and time, in random order.

    User u likes items whose index i has i % 4 == u % 4.
    """
    chance = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        liked = chance.permutation(np.arange(user % 4, items, 4))[:each]
        times = chance.permutation(1000)[:each]
        # The identifiers have gaps and do not begin at 0.
        rows += [
            (10 * user + 3, 2 * int(i) + 7, int(i) % 5 + 1, int(t)) for i, t in zip(liked, times, strict=True)
        ]
    # Every item that nobody likes is rated once, by a user with no other rating.
    seen = {item for _, item, *_ in rows}
    rows += [(5000 + i, 2 * i + 7, 3, 0) for i in range(items) if 2 * i + 7 not in seen]
    return [rows[i] for i in chance.permutation(len(rows))]


def write_movielens(folder: Path, rows: list[tuple[int, int, int, int]], name: str = "u.data") -> Path:
    """Write `rows` as a file of ml-100k, ml-1m or ml-20m, which `name` selects, and return `folder`."""
    folder.mkdir(exist_ok=True)
    between = {"u.data": "\t", "ratings.dat": "::", "ratings.csv": ","}[name]
    head = "userId,movieId,rating,timestamp\n" if name == "ratings.csv" else ""
    lines = [between.join(map(str, row)) + "\n" for row in rows]
    (folder / name).write_text(head + "".join(lines))
    return folder
