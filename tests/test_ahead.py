"""Kernels compiled before a call runs: all at once, nothing launched meanwhile, errors where they always were."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest
import torch
import triton
from triton.runtime._async_compile import active_mode

from dsf.kernels.triton import ahead
from dsf.kernels.triton.launch import launch

pytestmark = pytest.mark.skipif(ahead._Mode is None, reason="this Triton compiles one kernel after the other")


class Kernel:
    """What Triton does at a launch, with an event in the place of a compiler."""

    def __init__(self, others=None, broken=False):
        self.ready, self.launches, self.compiled_by = False, [], []
        self.others, self.broken = others, broken

    @property
    def run(self):
        """Builds the launcher, as Triton's kernels do."""
        self.launcher_by = threading.current_thread()
        return self

    def compile(self):
        self.compiled_by.append(threading.current_thread())
        if self.others is not None:
            self.others.wait(timeout=20)  # until as many compile at the same time
        if self.broken:
            raise ValueError("does not compile")
        return self

    def get_ready(self):
        mode = active_mode.get()
        if self.ready:
            return self
        if mode is not None:
            return mode.submit(id(self), self.compile, lambda kernel: setattr(self, "ready", True))
        self.ready = self.compile() is self
        return self

    def warmup(self, *args, grid, **named):
        return self.get_ready()

    def __getitem__(self, grid):
        def run(*args, **named):
            if self.get_ready() is not None:
                self.launches.append(args)

        return run


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device := MagicMock())
    yield
    assert {c.args for c in device.call_args_list} <= {(3,)}


def call(kernels, log):
    for number, kernel in enumerate(kernels):
        launch(kernel, (1,), number)
    log.append(number)
    return "found"


def test_all_are_compiled_at_the_same_time_and_then_launched_once(monkeypatch):
    monkeypatch.setattr(ahead, "THREADS", 3)
    together = threading.Barrier(3)
    kernels, log = [Kernel(together) for _ in range(3)], []
    assert ahead.compiled(call, kernels, log) == "found"
    assert [k.launches for k in kernels] == [[(0,)], [(1,)], [(2,)]]
    assert all(k.compiled_by == [k.launcher_by] != [threading.current_thread()] for k in kernels)
    assert len(log) == 2 and not ahead.waiting()


def test_a_call_whose_kernels_are_there_runs_once():
    kernels, log = [Kernel() for _ in range(2)], []
    ahead.compiled(call, kernels, log)
    ahead.compiled(call, kernels, log)
    assert len(log) == 3 and [len(k.launches) for k in kernels] == [2, 2]


def test_nothing_is_launched_behind_one_that_is_missing():
    early, missing, late = Kernel(), Kernel(), Kernel()
    early.ready = late.ready = True
    ahead.compiled(call, [early, missing, late], [])
    assert len(early.launches) == 2 and len(missing.launches) == len(late.launches) == 1


def test_a_kernel_that_does_not_compile_says_so():
    kernels = [Kernel(), Kernel(broken=True), Kernel()]
    with pytest.raises(ValueError, match="does not compile"):
        ahead.compiled(call, kernels, [])
    assert not ahead.waiting() and active_mode.get() is None
    assert kernels[0].ready and kernels[2].ready


def test_an_error_of_the_call_itself_leaves_nothing_behind():
    def wrong():
        launch(Kernel(), (1,))
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        ahead.compiled(wrong)
    assert not ahead.waiting() and active_mode.get() is None


def test_inside_a_captured_graph_kernels_are_compiled_as_they_are_met(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel()
    ahead.compiled(call, [kernel], [])
    assert kernel.compiled_by == [threading.current_thread()] and len(kernel.launches) == 1


def test_a_caller_that_compiles_ahead_itself_is_left_alone():
    kernels, log = [Kernel(), Kernel()], []
    with ThreadPoolExecutor(2) as threads, triton.AsyncCompileMode(threads):
        assert ahead.compiled(call, kernels, log) == "found"
    assert len(log) == 1 and not ahead.waiting() and all(k.ready for k in kernels)


def test_torch_finds_sizes_and_computes_nothing_of_what_is_not_written():
    def steps(x):
        room = torch.empty(4, 6)
        launch(missing, (1,), room)
        table = torch.full((3,), 99)
        rows = x.index_select(0, table)  # beyond its end, as memory that no kernel has written may be
        view = room.unflatten(1, (2, 3)).transpose(0, 1)
        view.copy_(rows.new_zeros(2, 4, 3))
        total = torch.add(rows, 1.0, out=torch.empty_like(rows, dtype=torch.float64))
        first, *_ = view.to(torch.float16).contiguous().split(1)
        launch(late, (1,), rows, view, total, first, *view.unbind(0), table.sum(0))

    seen, missing, late = [], Kernel(), Kernel()
    late.warmup = lambda *args, grid: seen.extend(args)
    with pytest.raises(IndexError):  # when all is ready, and steps runs again
        ahead.compiled(steps, torch.ones(5, 3))
    rows, view = torch.ones(3, 3), torch.ones(4, 6).unflatten(1, (2, 3)).transpose(0, 1)
    expected = [rows, view, rows.double(), torch.ones(1, 4, 3).half(), *view.unbind(0), torch.tensor(1)]
    for x, like in zip(seen, expected, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (like.shape, like.stride(), like.dtype, like.device)
