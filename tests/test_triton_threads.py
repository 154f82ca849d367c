"""Calls on a second thread, in Triton's interpreter: what the first left behind, or began, serves it, too.

Threads that call at once, and streams, are a GPU's (test_gpu_threads.py): the interpreter runs one kernel at a time.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from interpreted import interpreted
from several_threads import NAMES, assert_same, call_of, results

pytestmark = interpreted


@pytest.mark.parametrize("begins", [True, False], ids=["second thread first", "first thread first"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_thread(name, begins, monkeypatch):
    calls, inputs = call_of(name, monkeypatch, "cpu")
    with ThreadPoolExecutor(1) as other:
        expected = other.submit(results, calls, inputs).result() if begins else results(calls, inputs)
        found = results(calls, inputs) if begins else other.submit(results, calls, inputs).result()
        assert_same(found, expected)
        assert_same(other.submit(results, calls, inputs).result(), expected)
