"""Triton's private launcher: used with releases it was tried with, after it has launched as Triton itself does."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from dsf.kernels.triton import launcher


@pytest.fixture(autouse=True)
def unknown_again(monkeypatch):
    monkeypatch.setattr(launcher, "_proof", None)


@pytest.mark.parametrize(
    ("version", "alike", "found"), [("3.6.0", True, True), ("3.6.0", False, False), ("3.9.1", True, False)]
)
def test_an_untried_release_or_another_result_takes_the_public_way(monkeypatch, version, alike, found):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launcher.triton, "__version__", version)
    monkeypatch.setattr(launcher, "_launches_alike", lambda: asked.append(1) or alike)
    assert launcher.prove() is launcher.prove() is launcher.proven() is found
    assert len(asked) == (version == "3.6.0")  # an untried one is not even tried


def test_nothing_is_found_out_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not launcher.prove() and launcher._proof is None


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_tried_on_another_thread_on_the_caller_s_gpu_once(fails, monkeypatch):
    """What goes wrong there is the caller's error."""
    asked, device = [], MagicMock()

    def alike():
        asked.append(threading.current_thread())
        return 1 / 0 if fails else True

    monkeypatch.setattr(launcher.triton, "__version__", "3.6.0")
    monkeypatch.setattr(launcher, "_launches_alike", alike)
    for name, found in (("is_initialized", True), ("is_current_stream_capturing", False), ("current_device", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "device", device)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        for _ in range(2):
            with launcher.proving():
                pass
    assert launcher.proven() is not fails
    assert len(asked) == 1 and asked[0] is not threading.current_thread()
    assert [c.args for c in device.call_args_list] == [(3,)]


CODE = """
#include <Python.h>
static PyObject *number(PyObject *self, PyObject *args) {{ return PyLong_FromLong({}); }}
static PyMethodDef methods[] = {{{{"number", number, METH_NOARGS, ""}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "made", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_made(void) {{ return PyModule_Create(&module); }}
"""


def test_modules_of_one_name_stay_apart(monkeypatch, tmp_path):
    """As launchers are, when threads load them: Python has one module object for a name, and fills it anew."""
    build = launcher.build
    monkeypatch.setattr(launcher.triton.knobs.cache, "dir", str(tmp_path))
    assert launcher.mend_loading()

    def load(number):
        return build.compile_module_from_src(CODE.format(number), "made")

    first, second, again = load(1), load(2), load(1)
    assert (first.number(), second.number(), again.number()) == (1, 2, 1)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: load(1 + i % 2).number(), range(200)))
    assert found == [1 + i % 2 for i in range(200)]


class Source:
    """A kernel's source, as Triton compiles it."""

    busy = threading.Lock()

    def make_ir(self, name):
        assert self.busy.acquire(blocking=False), "two are translated at the same time"
        time.sleep(0.02)
        self.busy.release()
        return name


def compiling(src, name):
    """What Triton asks a mode for compiling on threads to call."""
    return lambda: src.make_ir(name)


def test_one_source_is_translated_at_a_time():
    asked = [launcher.hurried(compiling(Source(), name)) for name in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        assert [x.result() for x in [threads.submit(f) for f in asked]] == ["a", "b", "c", "d"]
    assert launcher.hurried(own := lambda: "a release that asks otherwise") is own


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1"])
def test_of_tried_releases_the_launcher_is_made_beside_the_kernel(version, monkeypatch):
    made = threading.Event()
    monkeypatch.setattr(launcher.triton, "__version__", version)
    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda src, known: known.launch_pdl or made.set()))
    monkeypatch.setattr(launcher.triton.runtime, "driver", driver)
    src = Source()
    src.make_ir = lambda name: made.wait(timeout=20 if version == "3.6.0" else 0)
    assert launcher.hurried(compiling(src, "a"))() is (version == "3.6.0")


@pytest.mark.gpu
def test_it_launches_as_triton_does():
    torch.zeros(1, device="cuda")
    tried = tuple(int(x) for x in launcher.triton.__version__.split(".")[:2]) in launcher.TRIED
    assert launcher.prove() is tried
