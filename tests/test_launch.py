"""Kernels compiled before a call runs: all at once, each once, errors where a plain launch has them."""

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
import triton
import triton.language as tl

pytest.importorskip("triton.runtime._async_compile", reason="this Triton compiles one kernel after the other")
from triton_private import active_mode, asked_of

from dsf.kernels.triton import launch, launcher, operators, structs
from dsf.kernels.triton.operators import Scheduled


class Kernel:
    """What Triton does at a launch, with an event in the place of a compiler."""

    def __init__(self, others=None, broken=False):
        self.ready, self.launches, self.compiled_by, self.asked = False, 0, [], []
        self.others, self.broken, self.__name__ = others, broken, "kernel"
        self.fn = lambda first, second, third: None

    @property
    def run(self):
        """Builds the launcher the first time, as Triton's kernels do."""
        if not hasattr(self, "launcher_by"):
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
            after = [lambda kernel: setattr(self, "ready", True), lambda kernel: None]  # the latter since Triton 3.9
            return mode.submit(id(self), self.compile, *after[: len(signature(launch._Mode.submit).parameters) - 3])
        self.ready = self.compile() is self
        return self

    def warmup(self, *args, grid, **named):
        self.asked.append(args)
        return self.get_ready()

    def __getitem__(self, grid):
        def run(*args, **named):
            self.get_ready()
            self.launches += 1
            self.given = args

        return run


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(launcher, "_proof", False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", device := MagicMock())
    monkeypatch.setattr(launch, "BESIDE", True)
    launch._ready.clear()
    operators.forget()
    yield
    assert {c.args for c in device.call_args_list} <= {(3,)}


def run(kernels):
    def host(x):
        view = x.new_empty(8)[1:]
        for number, kernel in enumerate(kernels):
            launch.launch(kernel, (1,), (x, view), number)
        return view

    Scheduled(host)(torch.ones(2, dtype=torch.bfloat16))


def test_all_are_compiled_at_the_same_time_and_then_launched_once(monkeypatch):
    monkeypatch.setattr(launch, "THREADS", 3)
    together = threading.Barrier(3)
    kernels = [Kernel(together) for _ in range(3)]
    run(kernels)
    assert [k.launches for k in kernels] == [1, 1, 1]
    assert all(k.compiled_by == [k.launcher_by] != [threading.current_thread()] for k in kernels)
    ((pointers, number),) = kernels[2].asked
    assert number == 2 and [(x.dtype, x.data_ptr()) for x in pointers] == [(torch.bfloat16, 0), (torch.bfloat16, 2)]


def test_the_mode_takes_what_later_releases_of_triton_give_it(monkeypatch):
    monkeypatch.setattr(launch._Mode, "submit", lambda self, *given: given)
    given = ("key", lambda: None, lambda kernel: None, lambda promise: None)
    with ThreadPoolExecutor(1) as threads:
        assert launch._Ahead(threads, load=False).submit(*given) == given


def test_kernels_of_many_arguments_begin_first(monkeypatch):
    monkeypatch.setattr(launch, "THREADS", 1)
    begun, kernels = [], [Kernel(), Kernel(), Kernel()]
    for kernel in kernels:
        kernel.compile = lambda kernel=kernel: begun.append(kernel) or kernel

    def host(x):
        for kernel, args in zip(kernels, [(x, 1), (x, (x, 1, (2, 3))), (x, (x, 1))], strict=True):
            launch.launch(kernel, (1,), *args)
        return x.new_empty(8)

    Scheduled(host)(torch.ones(2))
    assert begun == [kernels[1], kernels[2], kernels[0]]


def test_of_threads_that_need_a_kernel_at_the_same_time_one_compiles_it():
    """Where Triton keeps a kernel that is being compiled from other threads, as before 3.8."""
    kernel, both = Kernel(), threading.Barrier(2)
    compiled = kernel.compile

    def slowly():
        time.sleep(0.2)
        return compiled()

    def thread():
        both.wait(timeout=20)
        run([kernel])

    kernel.compile = slowly
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(thread) for _ in range(2)]:
            done.result(timeout=20)
    assert kernel.launches == 2 and len(kernel.compiled_by) == 1
    assert not launch._promised


def test_kernels_of_gradients_are_compiled_beside_the_others_and_loaded_where_they_are_needed(monkeypatch):
    together = threading.Barrier(2)
    own, later = Kernel(together), Kernel(together)

    def host_of(kernel):
        return lambda x: launch.launch(kernel, (1,), (x,)) or x.new_empty(8)

    gradient = Scheduled(host_of(later))
    monkeypatch.setitem(operators._known, "gradient", gradient)
    Scheduled(host_of(own), lambda made, x: ("gradient", x))(x := torch.ones(2, requires_grad=True))
    assert own.launches == 1 and later.launches == 0 and not hasattr(later, "launcher_by")
    gradient(x)
    assert later.launches == len(later.compiled_by) == 1
    assert len({later.launcher_by, *own.compiled_by, *later.compiled_by, threading.current_thread()}) == 4


def test_with_few_processors_the_call_s_own_kernels_are_compiled_alone(monkeypatch):
    monkeypatch.setattr(launch, "BESIDE", False)
    kernel, asked = Kernel(), []
    Scheduled(lambda x: launch.launch(kernel, (1,), (x,)) or x.new_empty(8), lambda *x: asked.append(x))(
        torch.ones(2, requires_grad=True)
    )
    assert kernel.launches == 1 and not asked


def test_gradients_are_foreseen_though_a_call_without_them_compiled_all_else(monkeypatch):
    own, later = Kernel(), Kernel()
    gradient = Scheduled(lambda x: launch.launch(later, (1,), (x,)) or x.new_empty(8))
    monkeypatch.setitem(operators._known, "gradient", gradient)
    forward = Scheduled(lambda x: launch.launch(own, (1,), (x,)) or x.new_empty(8), lambda made, x: ("gradient", x))
    forward(torch.ones(2))
    assert not later.asked
    forward(torch.ones(2, requires_grad=True))
    deadline = time.monotonic() + 20
    while not later.compiled_by and time.monotonic() < deadline:
        time.sleep(0.01)
    assert later.compiled_by and len(own.compiled_by) == 1


@pytest.mark.parametrize("broken", ["kernel", "host"])
def test_a_gradient_that_does_not_compile_stops_nothing_before_it_is_asked_for(broken, monkeypatch):
    own, kernel = Kernel(), Kernel(broken=True)

    def host(x):
        if broken == "host":
            raise RuntimeError("does not compile")
        launch.launch(kernel, (1,), (x,))
        return x.new_empty(8)

    gradient = Scheduled(host)
    monkeypatch.setitem(operators._known, "gradient", gradient)
    forward = Scheduled(lambda x: launch.launch(own, (1,), (x,)) or x.new_empty(8), lambda made, x: ("gradient", x))
    x = torch.ones(2, requires_grad=True)
    assert forward(x).shape == (8,)
    with pytest.raises((ValueError, RuntimeError), match="does not compile"):
        gradient(x)


def test_a_kernel_that_does_not_compile_says_so():
    kernels = [Kernel(), Kernel(broken=True), Kernel()]
    with pytest.raises(ValueError, match="does not compile"):
        run(kernels)
    assert active_mode.get() is None and kernels[0].ready and kernels[2].ready


def test_inside_a_captured_graph_kernels_are_compiled_as_they_are_met_and_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel()
    run([kernel])
    assert kernel.compiled_by == [threading.current_thread()] and kernel.launches == 1
    assert not operators._functions.kept


def test_a_caller_that_compiles_on_threads_himself_is_left_alone():
    kernels = [Kernel(), Kernel()]
    with ThreadPoolExecutor(2) as threads, triton.AsyncCompileMode(threads):
        run(kernels)
    assert all(k.ready for k in kernels)


class Pair(NamedTuple):
    at: object
    step: object


@dataclass(frozen=True, repr=False)
class Sized(structs.Config):
    SIZE: int
    HOLE: object


def hole_of(tmp_path, name, source):
    """A printed function: always `hole` of the module `holes`."""
    path = tmp_path / name / "holes.py"
    path.parent.mkdir()
    path.write_text(f"import triton\n\n\n@triton.jit\ndef hole(x):\n    return {source}\n")
    spec = importlib.util.spec_from_file_location("holes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hole


def test_structs_reach_triton_as_structs():
    kernel = Kernel()

    def host(x):
        launch.launch(kernel, (1,), Pair(x, 3), (Pair(x[1:], 2), None))
        return x.new_empty(1)

    Scheduled(host)(torch.ones(2))
    ((first, (second, nothing)),) = kernel.asked
    assert (first.step, second.step, nothing) == (3, 2, None) and second.at.data_ptr() == 4
    assert isinstance(kernel.given[0], Pair) and isinstance(kernel.given[1][0].at, torch.Tensor)


def test_a_config_is_another_where_a_function_in_it_has_another_source(tmp_path):
    holes = [hole_of(tmp_path, name, source) for name, source in (("a", "x + 1"), ("b", "x * 2"), ("c", "x + 1"))]
    assert len({repr(x) for x in holes}) == 1
    first, second, again = (Sized(16, x) for x in holes)
    assert first == Sized(16, holes[0]) and hash(first) == hash(Sized(16, holes[0]))
    assert first != second and str(first) == str(second) == "Sized(SIZE=16, HOLE=hole)"
    assert first.cache_key != second.cache_key == repr(second) and first.cache_key == again.cache_key


def test_compile_time_constants_are_not_taken_by_position():
    """What is compiled for 64 heads would be launched for 16, which Triton specialises alike."""

    @triton.jit
    def kernel(x, count, HEADS: tl.constexpr):
        pass

    def host(x, heads):
        launch.launch(kernel, (1,), x, 3, *heads, HEADS=0)
        return x.new_empty(1)

    Scheduled(host).schedule(torch.ones(2), ())
    with pytest.raises(TypeError, match="kernel: compile-time constants must be given by name"):
        Scheduled(host).schedule(torch.ones(2), (16,))


@triton.jit(do_not_specialize=["free"])
def _numbers(number, free, pair):
    """Which only says what Triton asks of its parameters."""


@pytest.mark.skipif(not hasattr(_numbers, "params"), reason="Triton's interpreter compiles nothing")
def test_numbers_that_are_specialised_alike_are_one_to_triton():
    numbers = [-16, -3, 0, 1, 2, 7, 16, 17, 48, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**40]
    asked = {x: asked_of(_numbers, x, x, (x, 3)) for x in numbers}
    told = {x: (launch.specialised(x), launch.specialised(x, True)) for x in numbers}
    for a in numbers:
        for b in numbers:
            for place, kind in ((0, 0), (1, 1), (2, 0)):
                assert told[a][kind] != told[b][kind] or asked[a][place] == asked[b][place]
