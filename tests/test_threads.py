"""Declaring recurrences in several threads at once: an expression stays one node."""

import sys
import threading

import pytest

import dsf
from dsf.language import expr as expressions
from dsf.language.expr import KEY, Expr

THREADS = 8


@pytest.fixture
def hurried_switches():
    """Threads that give way to each other as often as Python lets them."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(usual)


def at_once(build):
    """What every one of several threads builds, all beginning together."""
    found, barrier = [], threading.Barrier(THREADS)

    def run():
        barrier.wait()
        found.append(build())

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == THREADS
    return found


def test_threads_that_race_get_one_node(hurried_switches):
    k = Expr("input", (), ("k", None), frozenset({KEY}))
    for number in range(150):
        for nodes in zip(*at_once(lambda n=number: [k * (n + share / 64) for share in range(64)]), strict=True):
            assert all(x is nodes[0] for x in nodes)


def test_a_node_is_looked_up_again_before_it_is_kept(monkeypatch):
    """The race itself: every thread looks, finds nothing, and only then may any of them keep a node of its own."""
    table, missed = expressions._interned, threading.Barrier(THREADS)
    first_look = threading.local()

    class Slow:
        def get(self, identity):
            found = table.get(identity)
            if identity[0] == "raced" and not getattr(first_look, "over", False):
                first_look.over = True
                missed.wait()
            return found

        def __setitem__(self, identity, node):
            table[identity] = node

    monkeypatch.setattr(expressions, "_interned", Slow())
    nodes = at_once(lambda: Expr("raced", (), (1.0,), frozenset()))
    assert all(x is nodes[0] for x in nodes)


def test_a_delta_rule_declared_by_racing_threads_is_a_delta_rule(hurried_switches):
    def declare():
        @dsf.recurrence
        def delta(q: dsf.Key, k: dsf.Key, v: dsf.Value, b: dsf.Scalar) -> dsf.System:
            n = dsf.l2norm(k)
            return dsf.System(A=dsf.I - b * dsf.outer(n, n), B=n * (b * v), C=q)

        return delta.spec.structure

    for _ in range(10):
        assert set(at_once(declare)) == {"identity + delta"}
