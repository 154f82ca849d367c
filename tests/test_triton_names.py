"""Printed programs are known by content: saved graphs find them in another process; they hold no declaration."""

import gc
import os
import pickle
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from interpreted import interpreted
from test_lifetime import delta, gained, hadamard, inputs, turned

import dsf
from dsf.kernels.triton.chunk.operator import matrix_mixer
from dsf.kernels.triton.pointwise.programs import PROGRAMS
from dsf.triton.chunk import names, program_of

pytestmark = interpreted

DECLARATIONS = """
import dsf
from dsf import Key, Pair, Param, Scalar, System, Value

@dsf.recurrence
def ours(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    n = dsf.l2norm(k)
    return System(A=dsf.sigmoid(a) * (dsf.I - b * dsf.outer(n, n)), B=n * (b * v), C=q)

@dsf.recurrence
def scanned(x: Value, dt: Value, b: Key, c: Key, a: Param[Key, Value]) -> System:
    return System(A=dsf.exp(-dsf.exp(a) * dsf.softplus(dt)), B=dsf.l2norm(b) * x, C=dsf.l2norm(c))

@dsf.recurrence
def turning(q: Key, k: Key, v: Value, a: Scalar, t: Pair) -> System:
    return System(A=dsf.sigmoid(a) * dsf.turn(t), B=k * v + dsf.prev(k * v), C=q)

@dsf.recurrence
def across(q: Key, k: Key, v: Value, a: Value) -> System:
    return System(A=dsf.sigmoid(a), B=k * (v - dsf.sum_value(v)), C=q)
"""


def kernels(recurrence):
    """A use of all kernels: calls that are kept, packed ones, steps."""
    given = {n: x.requires_grad_() for n, x in inputs(recurrence).items()}
    for _ in range(3):
        recurrence(**given, backend="triton").sum().backward()
    recurrence(**given, cu_seqlens=torch.tensor([0, 4, 11]), backend="triton").sum().backward()
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    one = {n: (x[:, 0] if n in timed else x).detach() for n, x in given.items()}
    recurrence.step(None, **one, backend="triton")
    recurrence.plan(**{n: x.detach() for n, x in given.items()}, backend="triton")


@pytest.mark.parametrize("declare", [delta, hadamard, gained, turned], ids=lambda f: f.__name__)
def test_a_dropped_recurrence_is_freed(declare):
    recurrence = declare()
    kernels(recurrence)
    alive = weakref.ref(recurrence.spec)
    del recurrence
    gc.collect()
    assert alive() is None


def test_copies_print_nothing_anew(monkeypatch):
    from dsf.triton import print_chunk

    recurrence = delta()
    given = inputs(recurrence)
    first = recurrence(**given, backend="triton")
    monkeypatch.setattr(print_chunk, "emit_matrix", None)
    assert torch.equal(pickle.loads(pickle.dumps(recurrence))(**given, backend="triton"), first)
    assert torch.equal(delta()(**given, backend="triton"), first)


def test_a_program_that_is_not_there_is_printed_when_it_is_asked_for():
    recurrence = delta()
    given = list(inputs(recurrence).values())
    name = program_of(recurrence.spec)[1]
    expected = matrix_mixer(given, None, name, False)[0]
    del PROGRAMS[name]
    recurrence.spec.__dict__.pop("_derived")  # as in another process
    assert torch.equal(matrix_mixer(given, None, name, False)[0], expected)
    with pytest.raises(dsf.DsfError, match=r"delta: a graph runs a program of this recurrence.*another version of dsf"):
        PROGRAMS[name[:-4] + "0000"]
    with pytest.raises(dsf.DsfError, match=r"gone: .*import the module that declares it \(the zoo: dsf.mixers\)"):
        PROGRAMS["gone-0123456789abcdef-0123456789abcdef"]
    assert names(recurrence.spec) == [name, program_of(recurrence.spec, True)[1]]


class Model(torch.nn.Module):
    def __init__(self, recurrence):
        super().__init__()
        self.recurrence = recurrence

    def forward(self, **given):
        return self.recurrence(**given, backend="triton")


def captured(graph, example):
    """A backend of torch.compile that keeps the graph as dynamo has it."""
    captured.graph = graph
    return graph.forward


def test_saved_graphs_run_in_another_process(tmp_path, monkeypatch):
    (tmp_path / "declarations.py").write_text(textwrap.dedent(DECLARATIONS))
    monkeypatch.syspath_prepend(tmp_path)
    import declarations

    saved = {}
    for name in ("ours", "scanned", "turning", "across"):
        recurrence = getattr(declarations, name)
        given = inputs(recurrence)
        torch.export.save(torch.export.export(Model(recurrence), (), kwargs=given), tmp_path / f"{name}.pt2")
        torch.compiler.reset()
        calls = torch.compile(lambda r=recurrence, **x: r(**x, backend="triton"), backend=captured, fullgraph=True)
        saved[name] = {"given": given, "y": calls(**given), "graph": captured.graph}
    torch.save(saved, tmp_path / "saved.pt")
    script = """
    import sys, torch, dsf
    folder = sys.argv[1]
    dsf.register_operators()
    for declared in (False, True):
        if declared:
            sys.path.insert(0, folder)
            import declarations
        for name, one in torch.load(f"{folder}/saved.pt", weights_only=False).items():
            exported = torch.export.load(f"{folder}/{name}.pt2").module()
            order = [x.name for x in one["graph"].graph.nodes if x.op == "placeholder"]
            for run in (lambda: exported(**one["given"]), lambda: one["graph"](*one["given"].values())[0]):
                try:
                    found = run()
                except dsf.DsfError as error:
                    print("refused", declared, error)
                else:
                    print("right", declared, float((found - one["y"]).abs().max()) < 1e-5)
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(lines) == 16, done.stdout
    assert all(x.startswith("refused False") and "import the module that declares it" in x for x in lines[:8])
    assert lines[8:] == ["right True True"] * 8
