"""Each private name of torch exists and means what we assume; no file other than ours uses one."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import lr_scheduler

import programs
from hpcsgd import torch_private
from pythons import python

ROOT = Path(__file__).parents[1]
FILE = "hpcsgd/torch_private.py"
OF_PYTHON = {"_DummyThread", "_exit", "_getframe", "_replace"}
"""Private names that are not torch's, but those of os, sys, threading and named tuples."""


class Counting(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_of_a_subclass_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3).as_subclass(Counting)
    monkeypatch.setattr(Counting, "calls", 0)
    with torch_private.plainly():
        total = x.sum()
    assert (type(total), Counting.calls) == (Tensor, 0)
    assert type(x.sum()) is Counting
    assert Counting.calls > 0


def test_a_tensor_becomes_another_class_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = grad = torch.full((3,), 2.0)
    torch_private.become(grad, Counting)
    monkeypatch.setattr(Counting, "calls", 0)
    assert param.grad is grad
    assert float(param.grad.sum()) == 6
    assert Counting.calls > 0
    torch_private.become(grad, Tensor)
    assert type(param.grad.clone()) is Tensor


def test_the_version_counts_writes_in_place() -> None:
    x = torch.zeros(3)
    before = torch_private.version(x)
    x.add_(1)
    x.view(-1)[:1].mul_(2)
    assert torch_private.version(x) == before + 2
    x.data.add_(1)
    assert torch_private.version(x) == before + 2, "our own writes by .data do not count"


def test_the_parts_of_a_sparse_tensor_as_they_are() -> None:
    indices, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    x = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=False)
    found = torch_private.parts_of_coo(x)
    assert [each.tolist() for each in found] == [[[1, 1]], [2.0, 3.0]]
    with pytest.raises(RuntimeError, match="uncoalesced"):
        x.values()


def test_a_backward_pass_tells_that_it_runs_and_ends() -> None:
    heard: list[Any] = []
    x = torch.ones(2, requires_grad=True)

    def look(_: Tensor) -> None:
        heard.append(torch_private.in_backward())
        torch_private.at_end_of_backward(lambda: heard.append("over"))

    x.register_hook(look)
    assert not torch_private.in_backward()
    y = (2 * x).sum()
    y.register_hook(lambda _: heard.append("first"))
    y.backward()
    assert heard == ["first", True, "over"]
    assert not torch_private.in_backward()


def test_another_thread_is_in_no_backward_pass() -> None:
    heard: list[bool] = []
    x = torch.ones(2, requires_grad=True)

    def look(_: Tensor) -> None:
        thread = threading.Thread(target=lambda: heard.append(torch_private.in_backward()))
        thread.start()
        thread.join()

    x.register_hook(look)
    x.sum().backward()
    assert heard == [False]


def test_batch_norms_have_one_class_and_others_have_another() -> None:
    norms = nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)
    assert all(isinstance(norm, torch_private.BatchNorm) for norm in norms)
    assert not any(isinstance(x, torch_private.BatchNorm) for x in (nn.InstanceNorm2d(2), nn.LayerNorm(2)))


def test_the_tables_of_a_module_are_its_own() -> None:
    module = nn.Module()
    module.register_buffer("here", torch.ones(1))
    module.register_buffer("none", None)
    module.weight = module.same = nn.Parameter(torch.ones(1))
    module.inner = nn.Linear(1, 1)
    buffers = torch_private.buffers_of(module)
    assert [*buffers] == ["here", "none"]
    buffers["none"] = torch.zeros(1)
    assert module.none is buffers["none"], "what is written there is the module's"
    parameters, modules = torch_private.tables_of(module)
    assert [*parameters] == ["weight", "same"]
    assert [*modules] == ["inner"]
    del module.inner
    assert not modules, "they show what the module has at any time"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_modules_are_known() -> None:
    module, inside = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module))  # type: ignore[arg-type]
    inside.compile()
    assert torch_private.is_compiled(inside)


def test_the_versions_of_modules_in_a_state_dict() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    versions = torch_private.versions_of_modules(state)
    assert versions[""]["version"] == 2
    copy = OrderedDict(state)
    assert torch_private.versions_of_modules(copy) is None
    without = {name: x for name, x in copy.items() if name != "num_batches_tracked"}
    torch_private.set_versions_of_modules(copy, {"": {"version": 1}})
    old = OrderedDict(without)
    torch_private.set_versions_of_modules(old, {"": {"version": 1}})
    nn.BatchNorm1d(2).load_state_dict(old)  # a state from before there was a count of batches
    torch_private.set_versions_of_modules(old, versions)
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.BatchNorm1d(2).load_state_dict(old)


def test_fake_tensors_tell_shapes_and_compute_nothing() -> None:
    mode = torch_private.fake_tensors()
    x = mode.from_tensor(torch.ones(2, 3))
    with mode:
        y = x @ torch.ones(3, 5)
    assert y.shape == (2, 5)
    with pytest.raises(Exception, match=r"_local_scalar_dense|data-dependent"):
        float(y.sum())


def sgd() -> optim.SGD:
    return optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


def test_hooks_around_step_are_listed_and_shared() -> None:
    inner, outer = sgd(), sgd()
    heard: list[str] = []
    assert torch_private.has_hooks(inner)
    assert not torch_private.has_hooks(object.__new__(optim.SGD))
    inner.register_step_pre_hook(lambda *_: heard.append("before"))
    assert len(torch_private.hooks_of(inner)) == 1
    torch_private.share_hooks(inner, outer)
    removed = inner.register_step_post_hook(lambda *_: heard.append("after"))
    assert len(torch_private.hooks_of(outer)) == 2
    outer.step()
    assert heard == ["before", "after"]
    removed.remove()
    assert len(torch_private.hooks_of(outer)) == 1


def test_the_step_of_a_scheduler_is_known_and_a_step_that_went_around_it_counts() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    assert torch_private.is_by_scheduler(vars(optimizer)["step"])
    assert not torch_private.is_by_scheduler(sgd().step)
    torch_private.count_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    other = lr_scheduler.StepLR(sgd(), 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        other.step()


def test_rates_by_formula() -> None:
    optimizer = sgd()
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    rates = torch_private.closed_form_rates(scheduler)
    assert rates is not None
    assert list(rates()) == [0.25]
    scheduler.gamma = 0.1
    assert list(rates()) == [pytest.approx(0.01)]
    assert torch_private.closed_form_rates(lr_scheduler.ReduceLROnPlateau(sgd())) is None


class Answering(torch_private.DecidesScaling, optim.SGD):
    asked = 0

    def _answer_scaler(self) -> bool:
        self.asked += 1
        return False


class Unscaled(torch_private.Unscaling):
    def _unscaled(
        self, optimizer: optim.Optimizer, unscale: Callable[[], dict[torch.device, Tensor]], found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        assert float(found_inf) == 0
        found = unscale()
        self.seen = {device.type: float(flag) for device, flag in found.items()}
        return {device: torch.ones_like(flag) for device, flag in found.items()}


def test_torchs_scaler_asks_the_optimizer_and_hears_what_is_not_finite() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = Answering([weight], lr=1.0), Unscaled("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    assert float(weight.grad) == 4
    scaler.step(optimizer)
    assert optimizer.asked > 0
    assert scaler.seen == {"cpu": 0.0}
    assert float(weight.grad) == 1, "unscaled"
    assert weight.tolist() == [1], "no step: the flag that came back says that a gradient was not finite"
    scaler.update()
    assert scaler.get_scale() == 2


def test_who_scales_gradients_itself_is_known() -> None:
    assert not torch_private.scales_gradients(sgd())
    fused = optim.Adam([nn.Parameter(torch.ones(1))], fused=True)
    assert torch_private.scales_gradients(fused)


def local_part_of_a_dtensor() -> None:
    x = DTensor.from_local(torch.zeros(4), DeviceMesh("cpu", [0]), [Shard(0)])
    here = torch.arange(4.0)
    torch_private.set_local(x, here)
    assert x.to_local().data_ptr() == here.data_ptr()
    here.add_(1)
    assert x.full_tensor().tolist() == [1, 2, 3, 4]


def memory_of_a_sharded_parameter() -> None:
    mesh = DeviceMesh("cpu", [0])
    model: Any = fully_shard(nn.Linear(3, 2, bias=False), mesh=mesh)
    (kept,) = torch_private.sharded_params(model)
    (param,) = model.parameters()
    model(torch.ones(1, 3))  # torch sets up the memory of parameters again before the first forward pass
    model.reshard()
    assert kept.sharded_param is param
    assert kept.pin_memory is False
    vector = torch.arange(1.0, 7.0)
    assert torch_private.padded_shard(kept).numel() == vector.numel()
    torch_private.set_padded_shard(kept, vector)
    assert torch_private.padded_shard(kept) is vector
    assert model(torch.ones(1, 3)).tolist() == [[6.0, 15.0]], "torch gathers from there"
    nested = fully_shard(nn.Sequential(model), mesh=mesh)
    assert [*torch_private.sharded_params(nested)] == [], "each unit has its own"


def store_of_the_default_group() -> None:
    store = torch_private.store_of_default_group()
    store.set("key", "value")
    assert store.get("key") == b"value"


IN_A_GROUP = {
    each.__name__: each
    for each in (local_part_of_a_dtensor, memory_of_a_sharded_parameter, store_of_the_default_group)
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_A_GROUP)
def test_what_needs_a_default_process_group(tmp_path: Path, name: str) -> None:
    """The test has its own process: a process has one such group, which other tests would find."""
    programs.run(python(__file__, name, str(tmp_path / "store")))


@pytest.fixture
def group(tmp_path: Path) -> Any:
    return dist.ProcessGroupGloo(FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=60))


def test_process_groups_take_vectors(group: Any) -> None:
    x, out = torch.arange(3.0), torch.zeros(3)
    torch_private.allgather(group, out, x).wait()
    assert out.tolist() == [0, 1, 2]
    out.zero_()
    torch_private.reduce_scatter(group, out, x + 1).wait()
    assert out.tolist() == [1, 2, 3]


def test_process_groups_can_begin_messages_together_and_be_given_a_timeout(group: Any) -> None:
    """Gloo has the names but does nothing for them. NCCL's are tested on GPUs."""
    assert callable(group._start_coalescing)
    assert callable(group._end_coalescing)
    options = group._Options()
    torch_private.set_timeout(options, timedelta(seconds=7))
    assert options._timeout == timedelta(seconds=7)


def test_groups_give_up_late_and_tell_whose_message_came(tmp_path: Path) -> None:
    done = threading.Event()  # until then neither rank closes the connection

    def talk(rank: int) -> None:
        store = FileStore(str(tmp_path / "both"), 2)
        group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        torch_private.set_timeout_of_group(group, timedelta(seconds=50))
        if rank == 1:
            group.send([torch.ones(2)], 0, 0).wait()
            done.wait()
            return
        try:
            work = group.recv_anysource([torch.zeros(2)], 0)
            work.wait()
            assert torch_private.source_of_message(work) == 1
            torch_private.set_timeout_of_group(group, timedelta(milliseconds=50))
            with pytest.raises(RuntimeError, match=r"(?i)time"):
                group.allgather([[torch.zeros(2), torch.zeros(2)]], [torch.zeros(2)]).wait()
        finally:
            done.set()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(talk, range(2)))


def test_all_of_it_is_tried_here() -> None:
    """This fails if a function of `torch_private` has no test."""
    own = ast.parse(Path(__file__).read_text())
    tried = {node.attr for node in ast.walk(own) if isinstance(node, ast.Attribute)}
    public = {name for name, x in vars(torch_private).items() if getattr(x, "__module__", "") == FILE_NAME}
    on_gpus = {"begin_together", "end_together"}
    assert public - tried - on_gpus == set()
    assert all(inspect.getdoc(getattr(torch_private, name)) for name in public)


FILE_NAME = torch_private.__name__


def names_of_torch() -> set[str]:
    """Return the private names that our one file uses: attributes, strings, and methods that torch calls."""
    tree = ast.parse((ROOT / FILE).read_text())
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {"_Hook", "_HOOKS", "_answer_scaler", "_unscaled"}
    return {name for _, name, _ in private(tree)} - own


def private(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the name, and whether code reads it from an object other than `self`.

    Otherwise the name is a string or a method.
    """
    for node in ast.walk(tree):
        asked = False
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names, asked = [name], True
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == "torch":
                names, asked = [*module.split("."), *(alias.name for alias in aliases)], True
            case ast.Import(names=aliases):
                modules = [alias.name.split(".") for alias in aliases]
                names, asked = [x for parts in modules if parts[0] == "torch" for x in parts], True
            case ast.Constant(value=str(text)) if text.isidentifier():
                names = [text]
            case ast.ClassDef(body=body):
                names = [x.name for x in body if isinstance(x, ast.FunctionDef)]
            case _:
                continue
        yield from ((getattr(node, "lineno", 0), x, asked) for x in names if x[:1] == "_" and x[:2] != "__")


def of_its_own(tree: ast.AST) -> set[str]:
    """Return the attributes that classes of this file set on `self`, and may read from similar objects."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {x.attr for x in nodes if isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"}


def private_elsewhere(root: Path) -> list[str]:
    """Return where other files read a private name of an object, or contain one of torch's that ours uses."""
    of_torch = names_of_torch()
    found: list[str] = []
    for path in sorted((root / "hpcsgd").rglob("*.py")):
        tree = ast.parse(path.read_text())
        harmless = OF_PYTHON | of_its_own(tree)
        where = str(path.relative_to(root))
        found += [
            f"{where}:{line}: {name}"
            for line, name, asked in private(tree)
            if where != FILE and (name in of_torch or (asked and name not in harmless))
        ]
    return found


@pytest.mark.slow
def test_no_other_file_uses_a_private_name() -> None:
    assert private_elsewhere(ROOT) == []


def test_a_private_name_elsewhere_is_found(tmp_path: Path) -> None:
    lines = (
        "x = tensor._version", "torch._C._cuda_init()", "from torch._subclasses import FakeTensorMode",
        "import torch._C", "getattr(state, '_metadata', None)", "super()._unscale_grads_(x)",
        "class A:\n    def _unscale_grads_(self): ...", "self.optimizer._anything",
    )  # fmt: skip
    harmless = ("self._version = 1", "os._exit(1)", "x = '_mine'", "x.__class__", "def _values(): ...")
    for i, line in enumerate((*lines, *harmless)):
        path = tmp_path / "hpcsgd" / f"{chr(ord('a') + i)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{line}\n")
    found = {line.split(":")[0] for line in private_elsewhere(tmp_path)}
    assert found == {f"hpcsgd/{chr(ord('a') + i)}.py" for i in range(len(lines))}


def test_torchs_private_names_are_those_known() -> None:
    assert names_of_torch() >= {"_unscale_grads_", "_get_fsdp_state", "_allgather_base", "_orig_mod"}


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
    IN_A_GROUP[sys.argv[1]]()
    dist.destroy_process_group()
