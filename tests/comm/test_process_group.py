"""Tests of a process group beyond the operations, which `conftest.py` tests with the battery."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcsgd.comm import ANY, Backend, Communicator, PeerLost, process_group, threads
from hpcsgd.comm.by_device import ByDevice
from hpcsgd.comm.process_group import GroupBackend
from hpcsgd.comm.shutdown import close_libraries
from hpcsgd.errors import UserError


def in_group(world: Communicator) -> Communicator:
    host = world.backend
    assert isinstance(host, ByDevice)
    return world.with_backend(GroupBackend(host.host, "gloo", world.timeout), "gloo")


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_no_default_group_is_made_and_nothing_is_left() -> None:
    kept: list[Communicator] = []

    def talk(world: Communicator) -> tuple[float, bool]:
        group, x = in_group(world).split(0, 0), torch.ones(3)
        kept.append(group)
        group.allreduce(x).wait()
        return x.sum().item(), dist.is_initialized()

    before = native_threads()
    assert threads.run(3, talk) == [(9.0, False)] * 3
    while_open = native_threads()
    close_libraries()
    close_libraries()
    assert while_open > before
    end = time.monotonic() + 20
    while native_threads() > before:
        assert time.monotonic() < end, f"{native_threads()} threads, {before} before"
        time.sleep(0.01)


def test_a_missing_rank_is_noticed_in_time() -> None:
    noticed = threading.Barrier(3)

    def wait_for_rank_one(world: Communicator) -> float:
        group = in_group(world)
        group.timeout = 0.5
        start = time.perf_counter()
        if world.rank != 1:
            with pytest.raises(PeerLost, match=r"allreduce over 3 ranks: no answer within 0.5 s"):
                group.allreduce(torch.ones(3)).wait()
        seconds = time.perf_counter() - start
        noticed.wait(20)
        close_libraries()  # otherwise the communication thread waits until the library's timeout
        return seconds

    assert max(threads.run(3, wait_for_rank_one, timeout=5)) < 5


def test_nobody_has_the_group_before_all_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank left before, gloo would wait for it twice the timeout, in ranks that are still connecting."""
    made, one_has_it = process_group._made, threading.Event()
    early: list[bool] = []

    def slowly(library: str, store: Any, ranks: Backend, timeout: float) -> Any:
        group = made(library, store, ranks, timeout)
        if ranks.rank == 2:
            early.append(one_has_it.wait(0.5))
        return group

    monkeypatch.setattr(process_group, "_made", slowly)
    threads.run(3, lambda world: (in_group(world), one_has_it.set()), timeout=30)
    assert early == [False]
    close_libraries()


def test_a_rank_that_is_gone_is_noticed_at_once() -> None:
    def leave(world: Communicator) -> str:
        group = in_group(world)
        if world.rank == 1:
            return ""
        with pytest.raises(PeerLost) as raised:
            for _ in range(1000):
                group.allreduce(torch.ones(3)).wait()
        return str(raised.value)

    left = threads.run(3, leave, timeout=30)
    assert left[0].startswith("allreduce over 3 ranks by gloo of torch")
    close_libraries()


def test_means_are_divided_once() -> None:
    def mean(world: Communicator) -> tuple[list[float], list[float]]:
        group, x, out = in_group(world), torch.tensor([3.0, 6.0]) * world.rank, torch.zeros(1)
        group.reduce_scatter(out, x, "mean").wait()
        group.allreduce(x, "mean").wait()
        return x.tolist(), out.tolist()

    assert threads.run(2, mean) == [([1.5, 3.0], [1.5]), ([1.5, 3.0], [3.0])]
    close_libraries()


def test_who_sends_has_to_be_named() -> None:
    def ask(world: Communicator) -> None:
        with pytest.raises(ValueError, match="from a rank that is named"):
            in_group(world).recv(torch.zeros(1), ANY).wait()

    threads.run(2, ask)
    close_libraries()


class NotedGroup:
    """A replacement for NCCL's group that records the calls made."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def noted(*arguments: Any) -> NotedGroup:
            self.asked.append((name, *arguments[1:2]))
            return self

        return noted


def test_messages_on_a_device_are_begun_together_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they began one after the other on a stream, two ranks would wait for each other."""
    group, watched = NotedGroup(), []

    def talk(world: Communicator) -> None:
        backend = GroupBackend(world.backend, "gloo", world.timeout)
        backend._group.abort()
        backend._group = group
        x = torch.empty(4, device="meta")
        monkeypatch.setattr(backend._watch, "add", lambda what, done: watched.append((what, done())))
        backend.sendrecv({1: x, 2: x}, {2: x})
        backend.send(x, 2)
        backend.alltoall(x, x)

    class StreamEvent:
        def __init__(self, device: torch.device) -> None:
            assert group.asked[-1] == ("wait",), "the moment is that behind the work"

        def passed(self) -> bool:
            return True

    monkeypatch.setattr(process_group, "StreamEvent", StreamEvent)
    threads.run(1, talk)
    sendrecv = [
        ("_start_coalescing",),
        ("recv", 2),
        ("send", 1),
        ("send", 2),
        ("_end_coalescing",),
        ("wait",),
    ]
    send = [("_start_coalescing",), ("send", 2), ("_end_coalescing",), ("wait",)]
    assert [(name, *rest) for name, *rest in group.asked if name != "alltoall_base"] == [
        *sendrecv, *send, ("wait",)
    ]  # fmt: skip
    assert [(what.split()[0], done) for what, done in watched] == [
        ("sendrecv", True), ("sendrecv", True), ("alltoall", True)
    ]  # fmt: skip
    close_libraries()


@pytest.mark.slow
def test_a_store_nobody_reaches_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "address_towards", lambda others: "192.0.2.1")

    def connect(world: Communicator) -> None:
        in_group(world)

    with pytest.raises(PeerLost, match=r"no way from \S+ to 192.0.2.1: "):
        threads.run(1, connect, timeout=1)


def test_the_address_is_that_towards_other_nodes() -> None:
    assert process_group.address_towards([]) == "127.0.0.1"
    assert process_group.address_towards(["localhost"]) == "127.0.0.1"
    assert process_group.address_towards(["no-such-host.invalid"])


def nowhere(*_: Any) -> Any:
    raise socket.gaierror(-2, "Name or service not known")


def test_hosts_without_known_names_connect_at_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", nowhere)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert process_group.address_towards(["no-such-host.invalid"]) == "127.0.0.1"
    for interface in ("", "no-such-one"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        with pytest.raises(UserError) as caught:
            process_group.address_towards(["no-such-host.invalid"])
        assert str(caught.value) == (
            "no address for 'no-such-host.invalid' nor for this host, 'node7': enter the names of the hosts "
            "in DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME to the network interface that leads from one to "
            "the other, as eth0"
        )


def test_gloo_listens_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def stands_for(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)

    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for good in (("192.0.2.1",), ("127.0.1.1", "192.0.2.1"), ("fe80::1%eth0",)):
        stands_for(*good)
        process_group.require_address_of_gloo()
    for bad in (("127.0.1.1",), ("::1", "127.0.0.1")):
        stands_for(*bad)
        with pytest.raises(UserError, match=r"'node7', stands for 127.0.\d.1, where no other host"):
            process_group.require_address_of_gloo()
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(UserError, match=r"for this host, 'node7' \(Name or service not known\): enter"):
        process_group.require_address_of_gloo()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    process_group.require_address_of_gloo()


def test_a_library_that_torch_lacks_is_named() -> None:
    assert process_group.missing("gloo") == ""
    if not dist.is_nccl_available():
        assert process_group.missing("nccl") == f"torch {torch.__version__} was built without NCCL"


def test_the_end_of_a_job_that_no_device_tells(capfd: pytest.CaptureFixture[str]) -> None:
    """The process is ended from another thread, because the one that waits for the device cannot react."""
    aborted: list[int] = []
    done = threading.Event()

    class Host:
        def abort(self, code: int) -> None:
            aborted.append(code)
            done.set()

    from hpcsgd.comm.watch import Watch

    watch = Watch(0.1, lambda what: process_group._end(Host(), 0.1, what))  # pyright: ignore[reportArgumentType]
    watch.add("allreduce over 3 ranks by nccl", lambda: False)
    assert done.wait(20)
    assert aborted == [69]
    assert "allreduce over 3 ranks by nccl: not done on the device within 0.1 s" in capfd.readouterr().err
