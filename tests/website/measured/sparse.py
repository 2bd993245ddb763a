"""Figures in docs/sparse.md about time, density and accuracy."""

from __future__ import annotations

from itertools import chain

from website.measured.results import from_to, megabytes, over, result, row, table

EXCHANGES = {
    "dense": "dense",
    "Top-k": "Top-k",
    "Top-k, own values": "Top-k, own",
    "CLT-k": "CLT-k",
    "DEFT": "DEFT",
}
SPARSIFIERS = ("dense", "Top-k", "CLT-k", "DEFT", "SIDCo", "hard threshold")


def exchange() -> str:
    lines = []
    for name, who in EXCHANGES.items():
        each = row("sparse_exchange", who=who)
        lines.append(
            [
                name,
                f"{1e3 * each['seconds_a_step']['median']:.0f}",
                over(each["deft_over"]["median"], 3),
                f"{each['density']:.3f}" if each["density"] else "1",
                megabytes(each["bytes_a_step"]),
            ]
        )
    return table(lines)


def trained(who: str, task: str) -> list[str]:
    """Return the sent density as a ratio to the one that was set, and the accuracy."""
    each = row("density", who=who, task=task)
    perplexity = f" ({each['perplexity']:.1f})" if "perplexity" in each else ""
    sent = "" if who == "dense" else f"{each['ratio']:.2f}"
    return [sent, f"{100 * each['accuracy']:.2f} %{perplexity}"]


def density() -> str:
    tasks = ("cifar10", "wikitext2", "mnist")
    return table([who, *chain.from_iterable(trained(who, task) for task in tasks)] for who in SPARSIFIERS)


def by_label() -> str:
    of = {who: f"{100 * row('density_by_label', who=who)['accuracy']:.2f} %" for who in SPARSIFIERS}
    more = {5: "five"}[round(row("density_by_label", who="Top-k")["ratio"])]
    return (
        f"the CNN with DEFT has an accuracy of {of['DEFT']} and with CLT-k {of['CLT-k']}, compared with "
        f"{of['dense']} of dense gradients. Top-k loses nothing ({of['Top-k']}), and sends "
        f"{more} times as much."
    )


def selection() -> str:
    goals = result("selection")["goals"]
    times = [1 / each["value"] for each in goals if each["name"].endswith("ours over torch.topk")]
    least = min(int(each["name"].split()[0].replace(",", "")) for each in goals)
    million = f"{least / 1e6:.0f} million"
    return f"on CPUs {from_to(times)} times as fast as `torch.topk` on {million} elements and more."
