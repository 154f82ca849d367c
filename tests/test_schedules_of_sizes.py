"""Schedules for other sizes: what symbols make of a length is, step for step, what that length alone would make.

Kernels are not launched here, but for the last tests, so that a length costs what it costs on the host.
"""

import functools
import random

import pytest
import torch
from interpreted import interpreted
from mixer_inputs import sample
from torch._dynamo.backends.debugging import aot_eager

from dsf import mixers

pytest.importorskip("triton")

from dsf.kernels.triton import launch, operators, unwritten
from dsf.kernels.triton.operators import Scheduled
from dsf.kernels.triton.scan import table
from dsf.kernels.triton.symbolic import Sheet
from dsf.kernels.triton.template import numbers_of
from dsf.triton import choose

NAMES = (
    "gated_deltanet", "ssd", "kda", "rwkv7", "s6", "rg_lru", "mlstm", "gated_delta_product", "longhorn", "mamba3",
)  # fmt: skip
LENGTHS = [*range(1, 66), *(1024 + 8 * i + i % 3 for i in range(12)), 6144, 6145, 12_300]


class Watch:
    """Every schedule that is asked for, compared with that of every template that holds for its sizes."""

    def __init__(self):
        self.compared = self.made = 0

    def found(self, host, args, tensors, device, kind):
        align = [0 if x is None else x.data_ptr() % 16 for x in tensors]
        made = host._made(args, tensors, align, device)
        numbers, kept = tuple(numbers_of(args)), operators._templates.get(operators._options(kind))
        for template in [] if kept is None else kept.templates:
            if template.function(numbers) is not None:
                found = template.schedule(numbers)
                assert (found.given, found.result) == (made.given, made.result)
                for a, b in zip(found.steps, made.steps, strict=True):
                    assert a == b
                self.compared += 1
        self.made += 1
        return self.real(host, args, tensors, device, kind)


@pytest.fixture(autouse=True)
def anew():
    operators.forget()


@pytest.fixture
def watch(monkeypatch):
    found = Watch()
    found.real = Scheduled._found

    def runner(x, capturing=False):
        launch._key(x)  # what Triton asks
        return lambda grid: lambda *args: None, ()

    monkeypatch.setattr(Scheduled, "_found", lambda self, *args: found.found(self, *args))
    monkeypatch.setattr(launch, "runner", runner)
    monkeypatch.setattr(operators, "runner", runner)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(choose, "interpreted", lambda: True)
    monkeypatch.setattr(table, "_processors", lambda device: table.PROCESSORS)
    return found


def inputs(recurrence, tokens, heads=1, batch=1):
    sizes = {"B": batch, "T": tokens, "H": heads, "N": 16, "N/2": 8, "P": 16}
    found = {}
    for i in recurrence.spec.inputs:
        shape = [sizes.get(a, i.kind.steps or 1) for a in i.kind.layout()]
        found[i.name] = torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()
    return found


def call(recurrence, x, **options):
    y, final = recurrence(**x, backend="triton", return_state=True, **options)
    torch.autograd.grad([y, final], list(x.values()), [y, final], allow_unused=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_length(name, watch):
    recurrence = mixers.get(name).recurrence
    lengths = LENGTHS[:]
    random.Random(0).shuffle(lengths)
    for tokens in lengths:
        call(recurrence, inputs(recurrence, tokens))
    assert watch.compared > 0.7 * watch.made
    assert all(x.left for x in operators._templates.kept.values())  # there is nothing that symbols cannot say


LENGTHS_OF_GRAPHS, BATCHES_OF_GRAPHS = [(1, 130), (1, 200), (1, 333)], [(4, 70), (3, 70), (8, 70)]


@pytest.mark.parametrize(
    "name, shapes, most",
    [
        ("s6", LENGTHS_OF_GRAPHS, 3),
        ("rg_lru", LENGTHS_OF_GRAPHS, 2),
        ("gated_deltanet", LENGTHS_OF_GRAPHS, 2),
        ("gated_deltanet", BATCHES_OF_GRAPHS, 2),
    ],
)
def test_graphs_of_compiled_calls_hold_for_other_sizes(name, shapes, most, watch):
    """S6's third length was an error, since torch compares no truth that depends on a length with one that does not.
    Each batch size had a graph."""
    torch.compiler.reset()
    graphs = []

    def counted(graph, given):
        graphs.append(graph)
        return aot_eager(graph, given)

    recurrence = mixers.get(name).recurrence
    compiled = torch.compile(lambda **x: recurrence(**x, backend="triton"), fullgraph=True, backend=counted)
    for batch, tokens in shapes:
        x = inputs(recurrence, tokens, batch=batch)
        y = compiled(**x)
        torch.autograd.grad(y, list(x.values()), y, allow_unused=True)
    assert len(graphs) <= most


@pytest.mark.parametrize("name", ["gated_deltanet", "ssd", "s6", "kda"])
def test_states_and_packed_sequences(name, watch):
    recurrence, draw = mixers.get(name).recurrence, random.Random(1)
    state = None
    for _ in range(60):
        tokens, count = draw.choice([7, 64, 130, 1000, 3000]) + draw.randrange(3), draw.choice([1, 2, 3, 17, 300])
        ends = [0, *sorted(draw.randrange(tokens + 1) for _ in range(count - 1)), tokens]
        x = inputs(recurrence, tokens)
        call(recurrence, x, cu_seqlens=torch.tensor(ends))
        _, state = recurrence(**x, backend="triton", return_state=True, initial_state=state)
        call(recurrence, x, initial_state=state.detach().requires_grad_())
    assert watch.compared > 0.5 * watch.made


@pytest.mark.parametrize("name", ["gated_deltanet", "s6"])
def test_strides_that_are_not_those_of_new_tensors(name, watch):
    recurrence = mixers.get(name).recurrence
    for tokens in range(90, 150):
        given = {}
        for kind, (entry, x) in zip(recurrence.spec.inputs, inputs(recurrence, tokens, 2).items(), strict=True):
            if kind.kind.time:  # heads before tokens; or more tokens than are taken
                wide = torch.zeros(1, 2, tokens, *x.shape[3:], dtype=x.dtype).transpose(1, 2)
                more = torch.zeros(1, tokens + tokens % 5, *x.shape[2:], dtype=x.dtype)[:, :tokens]
                x = (wide if tokens % 2 else more).requires_grad_()
            given[entry] = x
        call(recurrence, given)
    assert watch.compared > 0.5 * watch.made


def test_what_host_code_asks_is_a_condition():
    def host(x):
        n = x.shape[0]
        room = x.new_empty(n // 4 + 1, 2 if n % 3 == 0 else 5)
        return room[: min(n, 40)], x.new_empty(max(n - 100, 1))

    run = Scheduled(host)
    for n in range(1, 300):
        first, second = run(torch.ones(n))
        rows = min(n // 4 + 1, n, 40)
        assert first.shape == (rows, 2 if n % 3 == 0 else 5) and second.shape == (max(n - 100, 1),)
    (kept,) = operators._templates.kept.values()
    assert 2 < len(kept.templates) < 12


def test_numbers_that_python_counts_with_stay_what_they_are():
    sheet = Sheet([12, 5])
    a, b = sheet.given
    assert [0] * (a // b) == [0, 0] and "abc"[a % b] == "c" and list(range(b - 4)) == [0]
    assert [text for asked, text in sheet.lines if asked] == ["n0 == 2", "n1 == 2", "n2 == 1"]
    assert sheet.values([13, 5])["n1"] == 3
    with pytest.raises(TypeError, match="unhashable"):
        functools.lru_cache(lambda x: x)(a)


VIEWS = {
    "transpose": lambda x: x.transpose(1, -1),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "movedim": lambda x: x.movedim(1, -1),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(0),
    "squeeze": lambda x: x[:, :, :1].squeeze(2),
    "select": lambda x: x.select(2, -1),
    "slices": lambda x: x[:, 3:-2:3, None, ..., 1:],
    "past the end": lambda x: x[:, 2:9999, -1],
    "expand": lambda x: x[:, :, :1].expand(2, -1, 6, -1).unsqueeze(0).expand(3, -1, -1, -1, -1).contiguous(),
    "flatten": lambda x: x.flatten(1, 2),
    "unflatten": lambda x: x.unflatten(3, (2, -1)),
    "view": lambda x: x.view(2, -1, 2, 6),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "contiguous as it is": lambda x: x.contiguous()[1:],
    "to": lambda x: x.transpose(1, 2).to(torch.float64),
    "part to": lambda x: x.transpose(1, 2)[:, :, 1:].to(torch.float64),
    "one row to": lambda x: x[:1, 0].to(torch.float64),
    "unlike rows": lambda x: x.transpose(1, 2)[:, :, 1:] * x[:, 1:].transpose(1, 2).contiguous(),
    "one row by others": lambda x: x[..., 0] * x[:, :, :1, 0],
    "numbers": lambda x: x.new_zeros(x.numel() // x.shape[1], x.shape[1]),
    "product": lambda x: x * x[:, :, :1],
    "sum": lambda x: x.sum(1, keepdim=True) + x.sum((0, 2), True),
    "cat": lambda x: torch.cat([x, x[:, 1:]], dim=1),
    "comparison": lambda x: torch.where(x > 0, x, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("how", VIEWS)
def test_tensors_without_memory_are_torchs(how):
    """And where they are not, they say that they do not know."""
    run = Scheduled(lambda x: VIEWS[how](x).clone())
    for tokens in (40, 41, 57, 64):
        x = torch.randn(2, tokens, 3, 4)
        found, expected = run(x), VIEWS[how](x).clone()
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    (kept,) = operators._templates.kept.values()
    assert len(kept.templates) == 1


def test_a_layout_that_is_not_known_is_no_template():
    x = unwritten.Unwritten((Sheet([7]).given[0], 3), (1, 9), torch.float32)
    with pytest.raises(unwritten.Unsaid, match="lays out"):
        unwritten.evaluate(torch.cat, ([x, x],), {})


@interpreted
@pytest.mark.parametrize("name", ["gated_deltanet", "ssd", "s6", "rwkv7", "mlstm"])
def test_calls_of_lengths_that_were_never_met(name):
    recurrence = mixers.get(name).recurrence

    def results(tokens):
        x = {n: y.float().requires_grad_() for n, y in sample(recurrence, 1, tokens).items()}
        y, final = recurrence(**x, backend="triton", return_state=True)
        weight = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        return y, final, *torch.autograd.grad((y * weight).sum() + final.sum(), list(x.values()))

    found = {tokens: results(tokens) for tokens in (19, 22, 23, 41, 35)}
    assert any(x.templates for x in operators._templates.kept.values())
    for tokens, given in found.items():
        operators.forget()
        assert all(torch.equal(a, b) for a, b in zip(given, results(tokens), strict=True))
