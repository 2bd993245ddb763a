"""Figures in benchmarks/README.md about goals and about results that no other page has."""

from __future__ import annotations

from math import ceil
from statistics import median

from guard.judging import losses
from guard.training import GUARDED, METHODS, PLAIN, WITHOUT
from harness import Spread, ratios
from hpcsgd.train.growth import growths_of
from probe_distances import SHORT, by_way
from website.measured import late, probe
from website.measured.results import from_to, goal, result, row, rows, table, with_quartiles


def slow_groups() -> str:
    percent = 100 * goal("ensemble_reallocation", "nine in ten of settled epochs")
    return (
        f"nine of ten epochs take at most {percent:.0f} % longer than with the best division (goal 15 %, "
        "missed)"
    )


def averages() -> str:
    (four, more), (two, and_more) = (
        [goal("ensemble_rounds", f"{P} islands of 1, {size} MB") for size in (4, 45)] for P in (4, 2)
    )
    return (
        f"One average takes {four:.2f} (4 MB) and {more:.2f} (45 MB) of MPI's allreduce over TCP plus the "
        f"commit with four groups of one rank, {two:.2f} and {and_more:.2f} with two. The commit takes "
        f"{goal('ensemble_rounds', 'ms of a commit'):.1f} ms (goal 5 ms, missed)."
    )


def random_runs() -> str:
    found = rows("goodput", part="random run")
    kills, averages = (sum(each[key] for each in found) for key in ("kills", "rounds"))
    assert not any(each["wrong"] for each in found)
    return f"of {len(found)} random runs with {kills:,} kills and {averages:,} averages, none was"


def simulated_goodput() -> str:
    measured = rows("goodput", part="measured")
    apart = [100 * abs(each["goodput"] - each["simulated"]) for each in measured if each.get("simulated")]
    mean = 100 * goal("goodput", "simulated against measured")
    return f"is off by {mean:.0f} points on average and by at most {max(apart):.0f}."


def selection() -> str:
    goals = result("selection")["goals"]
    missed = {each["name"]: f"{each['value']:.2f}" for each in goals if not each["met"]}
    small, tail = (
        missed[f"11,200,000 {kind}, 0.1%, 2 thread(s): ours over one read"]
        for kind in ("normal", "heavy-tailed")
    )
    more = [
        missed[f"{n},{kind}, 1.0%, 2 thread(s): ours over one read"]
        for n, kind in (("11,200", "000 heavy-tailed"), ("25,600", "000 normal"))
    ]
    return (
        f"It meets {len(goals) - len(missed)} of {len(goals)} goals (60 times `torch.topk`; 2 reads of the "
        f"array at 0.1 %, 2.5 at 1 %). Missed, with two threads: {small} and {tail} reads at 11.2 million "
        f"elements and 0.1 %, {more[0]} and {more[1]} at 11.2 and 25.6 million and 1 %."
    )


def sparseloco() -> str:
    def copies(what: str) -> float:
        return goal("wire", f"11,200,000: {what} over a copy")

    return (
        "in copies of 11.2 million elements: "
        f"selecting 64 of every 4096 takes {copies('select 64 of 4096'):.1f}, coding the indices "
        f"{copies('code their indices'):.2f}, decoding {copies('decode them'):.2f}, all that a rank sends "
        f"{copies('select and say all'):.1f} (goal 2, missed), receiving from one group "
        f"{copies('hear all'):.2f}."
    )


def token_reading() -> str:
    one, two = (
        [goal("token_reading", f"{size}: ours{how} over one read") for how in ("", ", 2 processes")]
        for size in ("1 byte", "2 bytes")
    )
    return (
        f"shuffled reading takes {one[0]:.1f} times (bytes) and {two[0]:.1f} times (tokens of 2 bytes) as "
        f"long as one `read()` after the other, with 2 processes {one[1]:.1f} and {two[1]:.1f} times (goal "
        "1.1, missed)."
    )


def staging() -> str:
    small, large = (goal("gpu/second", f"{size} MB: staged allreduce") for size in (16, 256))
    return (
        f"A staged allreduce of 16 MB takes {small:.2f} times as long as its two copies (goal 1.1); with 256 "
        f"MB it takes {large:.2f} times as long."
    )


def synchronizations() -> str:
    ours, gloo = (
        [
            median(each["seconds"]) / each["bound"]
            for rate in ("100mbit", "1gbit")
            for each in rows("step_time", what=what, rate=rate, model="6 M")
        ]
        for what in ("sync", "gloo allreduce")
    )
    return (
        f"A delayed step takes {late.longer(late.LINKS, '6 M')} % longer than computing (goal 5 %). One "
        f"synchronization takes {ours[0]:.2f} (100 Mbit/s) and {ours[1]:.2f} times (1 Gbit/s) what the link "
        f"needs for its bytes; gloo's allreduce {gloo[0]:.2f} and {gloo[1]:.2f}."
    )


def of_25_million() -> str:
    def seconds(who: str) -> str:
        return f"{late.seconds(who, '1gbit', '25 M'):.3f}"

    def ratio(who: str) -> str:
        each = row("step_time", who=who, rate="1gbit", model="25 M")["ratio"]["median"]
        return f"({each:.2f})"

    def both(who: str) -> str:
        return f"{seconds(who)} {ratio(who)}"

    return (
        f"computing {seconds('compute alone')} s, DDP {seconds('DDP 1 MB')} (buckets of 1 MB), `bsp` "
        f"{both('bsp')}, `hierarchical(8)` {both('hierarchical(8)')}, delayed {both('delayed(8)')}, streamed "
        f"{seconds('streamed(8)')} s {ratio('streamed(8)')}. Why delayed steps cost "
        f"{late.longer(('1gbit',), '25 M')} % of computing"
    )


def papers_scaling() -> str:
    worst = {each["name"]: each["value"] for each in result("paper_scaling")["goals"]}

    def within(who: str) -> int:
        return ceil(100 * worst[f"{who}: worst error of the hours"])

    longer = max(each["paper"] / each["hours"] for each in rows("paper_scaling", method="AR-SGD"))
    return (
        f"then SGP is within {within('SGP')} % and D-PSGD within {within('D-PSGD')} %. AR-SGD takes up to "
        f"{longer:.1f} times what eq. 3 allows an allreduce; recursive doubling, which sends log₂ n times "
        f"the model, is within {within('AR-SGD by recursive doubling')} %."
    )


def messages() -> str:
    two, four, hosts = (
        goal("alpha_beta", f"{where}: ours over mpi4py's")
        for where in ("2 ranks on 1 host(s)", "4 ranks on 1 host(s)", "4 ranks on 4 host(s)")
    )
    return (
        f"From a megabyte on ours take {two:.2f} (2 ranks) and {four:.2f} times as long on one host, and "
        f"{hosts:.2f} times between hosts"
    )


def short_ramp() -> str:
    growths = growths_of(by_way(result("probe_distances")["rows"])[SHORT])
    *most, last = (f"{each.rho:.2f}" for each in growths)
    return f"gives ρ = {', '.join(most)} and {last} for P = 4, 8, 16 and 32"


def cost_of_probes() -> str:
    mnist, images, digits = (
        100 * goal("probe_vs_accuracy", f"{job}: samples")
        for job in ("mnist_cnn", "cifar10_small", "digits_cnn")
    )
    batches = probe.batches()
    return (
        f"(goal 1 %, missed): {probe.of_the_job():.1f} % for CIFAR-10 at B = 128 and I = 8 ({batches} "
        f"batches), {mnist:.1f} % for MNIST (up to 16 groups), {images:.1f} % for 5000 images of CIFAR-10 "
        f"in batches of 32, {digits:.0f} % for the digits"
    )


def selsync_goal() -> str:
    behind = goal("selsync_table", "points of accuracy behind BSP of a SelSync 6 times as fast")
    return f"as accurate (missed by {behind:.1f} points)."


def selsync_overhead() -> str:
    step = row("selsync_overhead", what="step, ResNet-20, batch 32")["seconds"]["median"]
    norm = 1e3 * step * goal("selsync_overhead", "Δ over a step")
    whole = with_quartiles(row("selsync_overhead", what="the same with SelSync")["ratio"], 2)
    return (
        f"the squared norm takes {norm:.1f} ms of a step of {1e3 * step:.0f} ms, the exchange of 8 bytes "
        f"{goal('selsync_overhead', 'ms of the exchange'):.1f} ms, during the update. A whole step took "
        f"{whole} times one without"
    )


def after_backward() -> str:
    wide, narrow = (
        with_quartiles(row("sharded", who="bsp, after backward", rate="1gbit", P=P)["ratio"], 2)
        for P in (4, 2)
    )
    return f"`bsp` takes {wide} of HSDP's time at 1 Gbit/s on 4 × 2, and {narrow} on 2 × 4."


def simulated_failures() -> str:
    each = row("simulation_error", method="ensemble")
    lost = each["late"].partition(" ")[0]
    return (
        f"{lost} of 400 rounds lost their host (link cut, process killed, back after 2.5 s): "
        f"{each['measured']:.2f} steps per second, {each['simulated']:.2f} simulated "
        f"({100 * each['error']:.1f} % more)."
    )


FAMILIES = {
    "`hierarchical`, `bsp`, `ensemble_sync`": ("hierarchical", "bsp", "ensemble"),
    "`ad_psgd`, `async_sgd`, `ssp`": ("ad_psgd", "async_sgd", "ssp"),
    "`sgp`, `osgp`, `d_psgd`": ("sgp", "osgp", "d_psgd"),
}


def simulation_speed() -> str:
    def of(N: int, key: str, methods: tuple[str, ...]) -> list[float]:
        return [row("simulation_speed", N=N, K=1, method=method)[key] for method in methods]

    lines = []
    for name, methods in FAMILIES.items():
        few = of(10_000, "seconds", methods)
        memory = from_to(of(100_000, "gigabytes", methods), 2)
        low, _, high = memory.partition(" to ")
        seconds = [from_to(few, 1 if max(few) < 1 else 0), from_to(of(100_000, "seconds", methods))]
        lines.append([name, *(f"{each} s" for each in seconds), f"{low if low == high else memory} GB"])
    return table(lines)


def in_groups_of_eight() -> str:
    most = max(each["seconds"] for each in rows("simulation_speed", K=8))
    return f"In groups of eight it is at most {ceil(most)} s."


def muon() -> str:
    return (
        f"Muon with one owner per matrix takes {goal('muon', 'seconds more than with AdamW'):.2f} of the time"
    )


def noise_in_one_group() -> str:
    names = {
        "hierarchical": "`hierarchical(4)`",
        "diloco, momentum 0.5": "`diloco(4)`, outer momentum 0.5",
        "diloco, momentum 0.9": "`diloco(4)`, outer momentum 0.9",
        "delayed": "`delayed(hierarchical(4), 2)`",
        "streaming": "`streaming(diloco(4), 2, 1)`",
    }
    found = rows("guard")

    def over(who: str, case: str) -> Spread:
        return ratios(losses(found, who, case), losses(found, who, WITHOUT))

    assert all(each["met"] for each in result("guard")["goals"])
    return table([names[who], f"{over(who, PLAIN).median:.3f}", over(who, GUARDED)] for who in METHODS)


def goal_of_the_guard() -> str:
    (most,) = {each["goal"] for each in result("guard")["goals"] if "with a guard" in each["name"]}
    return f"The goals are met: at most {most:.2f} with the guard"
