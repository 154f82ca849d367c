"""Calls of every family of kernels by two threads at once, and on a second stream: the bits of a call alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from several_threads import NAMES, assert_same, call_of, results

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


@pytest.mark.parametrize("first", ["alone", "at once"])
@pytest.mark.parametrize("name", NAMES)
def test_two_threads_call_at_once(name, first, monkeypatch):
    """At once also where nothing of the kind ran before: the threads then make and compile the same schedules."""
    calls, inputs = call_of(name, monkeypatch, "cuda")
    alone = results(calls, inputs) if first == "alone" else None
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda _: results(calls, inputs), range(6)))
    torch.cuda.synchronize()
    alone = results(calls, inputs) if alone is None else alone
    for found in together:
        assert_same(found, alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_stream(name, monkeypatch):
    calls, inputs = call_of(name, monkeypatch, "cuda")
    expected = results(calls, inputs)
    for _ in range(3):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = results(calls, inputs)
        torch.cuda.synchronize()
        assert_same(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once(name, monkeypatch):
    """Neither may read or overwrite what the other's calls keep for themselves."""
    calls, inputs = call_of(name, monkeypatch, "cuda")
    expected, found = results(calls, inputs), []
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(results(calls, inputs))
    torch.cuda.synchronize()
    for each in found:
        assert_same(each, expected)
