"""Context parallelism, all ranks in one process: the law on every recurrence, exchanges, maps, errors."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from structures import ALL, FINITE, gated_delta, remembered, sample, scalar, stabilised, trapezoid, turned
from torch.autograd import forward_ad

import dsf
from dsf import Key, Pair, Param, Scalar, System, Value, mixers, sigmoid, turn
from dsf.checking.examples import Example
from dsf.checking.laws import LAWS
from dsf.checking.measure import Subject
from dsf.checking.ranges import ranges_of
from dsf.kernels import last_tokens
from dsf.kernels.affine import Frame, composed, entered
from dsf.mixers._module import Span
from dsf.models import CausalLM, ModelConfig
from dsf.parallel import Link, Sequence, Simulated, attach
from dsf.parallel import call as calls_over_ranks
from dsf.parallel.collectives import Gather, Sum, Swap, drive
from dsf.parallel.derive import adjoint, kind_of_map
from dsf.parallel.layout import Layout, Packing
from dsf.parallel.places import places_of
from dsf.parallel.tokens import gather_tokens
from dsf.parallel.world import World


@dsf.recurrence
def divided_entries(q: Key, k: Key, v: Value, a: Key, b: Value) -> System:
    """A decay for every entry, of num and den alike."""
    return System(A=sigmoid(a + b), B=k * v, C=q, normalize=lambda n, d, one: n / (one + d * d / one), drive=v)


RECURRENCES = [*(e.recurrence for e in mixers.ZOO), *ALL, divided_entries]
SOLVED = [r for r in RECURRENCES if r.spec.system.solve is not None]
# Seeds by which the law draws contiguous shards (one of them empty), head and tail, and packed sequences.
EXAMPLES = [
    Example(batch=2, tokens=11, heads=2, n=3, p=2, initial=True, cuts=(4, 9), seed=0),
    Example(batch=2, tokens=12, heads=2, n=3, p=2, seed=7),
    Example(tokens=11, heads=2, n=3, p=2, initial=True, cuts=(5,), seed=2),
]


def subject_of(recurrence):
    return Subject(recurrence, ranges_of(recurrence.spec))


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda r: r.name)
def test_a_sequence_cut_over_ranks_equals_the_sequence_run_whole(recurrence):
    for example in EXAMPLES:
        for m in LAWS["parallel"].measure(subject_of(recurrence), "auto", example):
            assert m.ok, (example, m)


@pytest.mark.parametrize("recurrence", [r for r in RECURRENCES if r.spec.is_framed], ids=lambda r: r.name)
def test_turns_and_previous_values_cross_cuts_packed_in_every_form(recurrence):
    """Sequences without tokens, and of one, at the cuts and elsewhere; states in and out; in both directions."""
    bounds = torch.tensor([0, 0, 1, 6, 6, 10, 11])
    inputs, world = sample(recurrence, B=1, T=11), Simulated(4, sizes=(1, 5, 0, 5))
    state = recurrence(**sample(recurrence, B=6, T=3), return_state=True)[1]
    for form in recurrence.forms:
        for reverse in (False, True):
            how = {"cu_seqlens": bounds, "initial_state": state, "return_state": True, "form": form, "reverse": reverse}
            expected, got = recurrence(**inputs, **how), recurrence(**inputs, **how, parallel=world)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_previous_values_of_bfloat16_are_float32_in_states_over_ranks():
    inputs = {name: x.bfloat16() for name, x in sample(remembered, T=9).items()}
    state = torch.randn(2, 2, *remembered.state_shape(N=3, P=2), requires_grad=True)
    found = []
    for given, world in (({n: x.double() for n, x in inputs.items()}, None), (inputs, Simulated(2))):
        how = {"initial_state": state.to(given["v"].dtype if world is None else state.dtype), "parallel": world}
        _, final = remembered(**given, **how, return_state=True)
        found.append((final, *torch.autograd.grad(final.square().sum(), state)))
    for expected, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut.double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_turns_of_bfloat16_are_summed_in_float64_over_ranks():
    """Angles of many turns in all: what is left of them after a cut is as exact as before."""
    inputs = sample(turned, B=1, T=64)
    rough = {name: x.bfloat16() for name, x in inputs.items()}
    exact = turned(**{name: x.double() for name, x in rough.items()})
    whole, cut = turned(**rough), turned(**rough, parallel=Simulated(4))
    assert cut.dtype == torch.bfloat16
    assert (cut - exact).norm() <= 1.1 * (whole - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("form", ["auto", "recurrent", "naive"])
def test_gradients_of_angles_of_params_keep_their_digits_over_ranks(form):
    """As those of the whole sequence do, which are found in float64 (tests/test_turns.py)."""

    @dsf.recurrence
    def ringing(q: Key, k: Key, v: Value, a: Scalar, w: Param[Pair]):
        return System(A=0.5 * sigmoid(a) * turn(w), B=k * v, C=q)

    x = {name: value.float() for name, value in sample(ringing, B=1, T=600).items()}
    state = ringing(**x, return_state=True)[1]
    found = []
    for wide, how in (
        (False, {"form": form, "parallel": Simulated(4, sizes=(300, 1, 0, 299))}),
        (True, {"form": "naive"}),
    ):
        inputs, start = {n: v.double() if wide else v for n, v in x.items()}, state.double() if wide else state
        w = inputs["w"].clone().requires_grad_()
        y, last = ringing(**inputs | {"w": w}, initial_state=start, return_state=True, **how)
        assert y.dtype == last.dtype == w.dtype
        found.append(torch.autograd.grad(y.square().sum(), w)[0].double())
    assert (found[0] - found[1]).norm() <= 3e-6 * found[1].norm()


@pytest.mark.parametrize("recurrence", SOLVED, ids=lambda r: r.name)
def test_solves_over_ranks_in_every_form(recurrence):
    """Packed, with a sequence without tokens and one of one token; states in and out; gradients of everything."""
    inputs, before = sample(recurrence, B=1, T=11), sample(recurrence, B=6, T=3)
    for x in (inputs, before):  # strengths of writing are positive, or there is nothing to solve
        x["beta"] = x["beta"].sigmoid()
    start, world = recurrence(**before, return_state=True)[1], Simulated(4, sizes=(3, 5, 0, 3))
    how = {"cu_seqlens": torch.tensor([0, 0, 1, 6, 6, 10, 11]), "return_state": True}

    def run(**more):
        leaves = [x.clone().requires_grad_() for x in (*inputs.values(), start)]
        y, last = recurrence(**dict(zip(inputs, leaves, strict=False)), initial_state=leaves[-1], **how, **more)
        return [y, last, *torch.autograd.grad(y.sin().sum() + last.cos().sum(), leaves)]

    for form in recurrence.forms:
        for got, expected in zip(run(form=form, parallel=world), run(form=form), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_the_law_looks_at_whether_earlier_ranks_matter():
    @dsf.recurrence
    def forgets(q: Key, k: Key, v: Value, a: Scalar) -> System:
        return System(A=1e-9 * sigmoid(a), B=k * v, C=q)

    quantities = {m.quantity: m for m in LAWS["parallel"].measure(subject_of(forgets), "auto", EXAMPLES[0])}
    assert quantities["y"].ok and not quantities["worth"].ok


@pytest.mark.parametrize("what", ["nothing", "one token", "no write", "one token more"])
def test_the_law_asks_nothing_of_what_remembers_nothing_by_its_declaration(what):
    @dsf.recurrence
    def short(q: Key, k: Key, v: Value) -> System:
        if what == "one token":
            return System(A=dsf.I, B=k * v, C=q, window=1)
        if what == "no write":
            return System(A=sigmoid(k), B=0, C=q, D=dsf.dot(k, k) * v)
        return System(A=0, B=k * v, C=q, read="before" if what == "one token more" else "after")

    measures = list(LAWS["parallel"].measure(subject_of(short), "auto", EXAMPLES[0]))
    assert all(m.ok for m in measures)
    assert ("worth" in {m.quantity for m in measures}) == (what == "one token more")


class Deaf(Simulated):
    """Ranks that hear only zeros in one kind of collective."""

    deaf_to = Gather

    def run(self, steps, first=()):
        def muted(one):
            request = next(one)
            while True:
                answer = yield request
                if isinstance(request, self.deaf_to):
                    answer = torch.zeros_like(answer)
                try:
                    request = one.send(answer)
                except StopIteration as end:
                    return end.value

        return super().run([muted(one) for one in steps], first)


@pytest.mark.parametrize("kind", [Gather, Swap, Sum], ids=lambda k: k.__name__)
def test_the_law_fails_where_ranks_do_not_hear_each_other(kind, monkeypatch):
    exchange = "transpose" if kind is Swap else "gather"
    world = type("Deafer", (Deaf,), {"deaf_to": kind})
    monkeypatch.setattr("dsf.checking.shards.Simulated", world)
    monkeypatch.setattr("dsf.checking.shards._exchange", lambda *_: exchange)
    found = [m for e in EXAMPLES for m in LAWS["parallel"].measure(subject_of(gated_delta), "auto", e)]
    wrong = {m.quantity for m in found if not m.ok}
    assert wrong >= ({"state"} if kind is Sum else {"y", "grad v"})


def test_the_law_fails_where_the_backward_exchange_is_lost(monkeypatch):
    monkeypatch.setattr("dsf.parallel.exchange._own", lambda shards: shards.nothing().unsqueeze(0))
    monkeypatch.setattr("dsf.checking.shards._exchange", lambda *_: "gather")
    found = list(LAWS["parallel"].measure(subject_of(scalar), "auto", EXAMPLES[0]))
    assert {m.quantity for m in found if not m.ok} >= {"grad v", "grad k"}
    assert all(m.ok for m in found if m.quantity in ("y", "state"))


# ---- exchanges -----------------------------------------------------------------------------------------------------


def run_over(recurrence, inputs, world, **options):
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    y = recurrence(**leaves, **({} if world is None else {"parallel": world}), **options)
    return [y, *torch.autograd.grad(y.sin().sum(), list(leaves.values()))]


@pytest.mark.parametrize("exchange", ["gather", "transpose", "relay", "two-level"])
@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize("recurrence", [gated_delta, stabilised, mixers.s6], ids=lambda r: r.name)
def test_every_exchange_in_every_layout(recurrence, layout, exchange):
    inputs = sample(recurrence, T=16, H=3)
    world = Simulated(4, layout, nodes=2 if exchange == "two-level" else 1, exchange=exchange)
    for got, expected in zip(run_over(recurrence, inputs, world), run_over(recurrence, inputs, None), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_ranks_ask_for_the_same_collectives_whatever_they_hold():
    inputs, logs = sample(gated_delta, T=9), []
    for sizes in ((3, 3, 3), (9, 0, 0), (0, 1, 8)):
        world = Simulated(3, sizes=sizes, exchange="gather")
        world.log = []
        run_over(gated_delta, inputs, world)  # ranks in step: DsfError where they differ
        logs.append([entry[:2] for entry in world.log])
    assert logs[0] == logs[1] == logs[2] == [("gather", "all"), ("gather", "all")]


def test_backward_sends_the_gradient_of_the_state_alone():
    inputs = sample(gated_delta, T=9)
    world = Simulated(3, exchange="gather")
    world.log = []
    run_over(gated_delta, inputs, world)
    (_, _, forward, _), (_, _, backward, _) = world.log
    n, p = 3, 2
    assert forward == (1, 2, 2, n * p + n * n) and backward == (1, 2, 2, n, p)  # [slots, B, H, ...]


def test_two_ranks_need_no_map_but_f():
    world = Simulated(2, exchange="gather")
    world.log = []
    run_over(gated_delta, sample(gated_delta, T=9), world)
    assert world.log[0][2] == (1, 2, 2, 3 * 2)


def test_exchanges_are_chosen_by_what_they_cost():
    frame, layout = Frame(128, 128, kind="dense"), Layout("contiguous", 64)
    near, far = Link(20e-6, 300e9), Link(30e-6, 45e9)
    fast = Simulated(2, links=(near, far)).choice(frame, 16, 4)
    assert fast.name == "gather" and fast.bytes == 16 * 128 * 128 * 4 and "us by the model" in fast.reason
    many = Simulated(64, nodes=8, links=(near, far)).choice(frame, 16, 4)
    assert many.name == "two-level" and many.bytes < 63 * 2 * 16 * 128 * 128 * 4
    assert Simulated(64, links=(near, far)).choice(frame, 16, 4).name == "transpose"
    assert Simulated(4).choice(Frame(4, 4, kind="channel"), 16, 4).name == "walk"
    with pytest.raises(dsf.FormError, match="differs by channel"):
        Simulated(4, exchange="gather").choice(Frame(4, 4, kind="channel"), 16, 4)
    assert layout.fragments == 64


# ---- maps ----------------------------------------------------------------------------------------------------------


def random_maps(frame, count, lead=(2,)):
    written = [torch.randn(*lead, frame.n, frame.total, dtype=torch.float64) for _ in range(count)]
    moves = [torch.rand(*lead, *frame.move_shape, dtype=torch.float64) - 0.4 for _ in range(count)]
    if frame.kind == "identity":
        moves = [None] * count
    return written, moves


FRAMES = [
    Frame(3, 2), Frame(3, 2, kind="scale"), Frame(3, 2, 0, "scale", 3, 1), Frame(3, 2, 0, "scale", 1, 2),
    Frame(3, 2, 0, "scale", 3, 2), Frame(3, 2, kind="dense"), Frame(3, 3, 1, "scale"), Frame(3, 4, 2, "scale", 3, 2),
    Frame(3, 3, 1, "dense"), Frame(3, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_maps_compose(frame):
    """Three maps one after the other are the map of the three, and rows of numbers hold it."""
    written, moves = random_maps(frame, 3)
    first = torch.randn(2, frame.n, frame.total, dtype=torch.float64)
    last = entered(frame, written, moves, [False] * 3, first)[-1]
    f, m = composed(frame, written, moves, [False] * 3)
    row = frame.pack(f, m)
    assert row.shape[-1] == frame.state_numbers + frame.move_numbers
    f, m = frame.unpack(row)

    def true(state):
        plain, gain = frame.split(state)
        return plain * frame.wide(gain.exp()) if frame.gain else plain

    torch.testing.assert_close(true(frame.into(m, f, first)), true(last))


@pytest.mark.parametrize("frame", FRAMES, ids=str)
def test_the_transpose_is_the_gradient(frame):
    (written,), (move,) = random_maps(frame, 1)
    state = torch.randn(2, frame.n, frame.total, dtype=torch.float64, requires_grad=True)
    after = frame.into(move, written, state)
    g = torch.randn(2, frame.n, frame.plain, dtype=torch.float64)
    _, gain = frame.split(after)
    # m is a choice of scale and carries no gradient: differentiate the plain columns at the m that was found
    plain, own = frame.split(state)
    added, other = frame.split(written)
    if not frame.gain:
        expected = torch.autograd.grad((after * g).sum(), state)[0]
    else:
        log, sign = frame.logarithm(move) if frame.kind == "scale" else (0.0, None)
        kept = (plain if sign is None else plain * sign) * frame.wide((own.detach() + log - gain.detach()).exp())
        if frame.kind == "dense":
            kept = move @ (plain * frame.wide((own - gain).detach().exp()))
        expected = torch.autograd.grad((kept * g).sum(), state)[0][..., : frame.plain]
        torch.testing.assert_close(kept + added * frame.wide((other - gain).exp()), frame.split(after)[0])
    torch.testing.assert_close(frame.back(move, g, own.detach(), gain.detach()), expected)


@pytest.mark.parametrize(
    "recurrence",
    [r for r in FINITE if r.spec.rule is None and r.spec.system.solve is None and not r.spec.is_framed],
    ids=lambda r: r.name,
)
def test_the_adjoint_is_a_recurrence(recurrence):
    """Its last state is the gradient of the state that the tokens are entered with."""
    inputs = sample(recurrence, T=7)
    n, columns = recurrence.state_shape(**{"N": 3, "P": 2})
    start = torch.randn(2, 2, n, columns, dtype=torch.float64, requires_grad=True)
    y, last = recurrence(**inputs, initial_state=start, return_state=True)
    dy, g = torch.randn_like(y), torch.randn_like(last)
    (expected,) = torch.autograd.grad((y, last), start, (dy, g))
    derived = adjoint(recurrence.spec)
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    flipped = {name: x.flip(1) if name in timed else x for name, x in inputs.items()}
    got = derived(**flipped, dy=dy.flip(1), initial_state=g, return_state=True)[1]
    torch.testing.assert_close(got, expected)


def test_a_long_shard_s_decay_is_summed_in_logarithms():
    """The product of these decays underflows float32, and what they multiply overflows it; both stay in exponents."""
    exact = {k: x.float().double() for k, x in sample(stabilised, T=600, H=1).items()}
    exact["f"] = exact["f"] - 1.0  # decays of a quarter: e^-800 in all
    exact["i"] = exact["i"] + torch.linspace(700.0, -200.0, 600, dtype=torch.float64)[None, :, None]
    inputs = {k: x.float() for k, x in exact.items()}

    def outputs(inputs, world):
        return stabilised(**inputs, **({} if world is None else {"parallel": world})).double()

    truth = outputs({k: x.double() for k, x in inputs.items()}, None)
    whole, cut = ((outputs(inputs, w) - truth).norm(dim=-1) for w in (None, Simulated(3, exchange="gather")))
    size = truth.norm(dim=-1).clamp(min=1e-6)
    assert cut.isfinite().all() and (cut / size).median() < 1e-6
    assert (cut / size).max() <= 4 * (whole / size).max()


# ---- layers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [e.name for e in mixers.ZOO])
def test_layers_over_ranks(name):
    """Convolutions see the tokens of other ranks, also where these have fewer than the convolution's taps."""
    torch.manual_seed(1)
    layer = mixers.get(name).module(d_model=32).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    wrt = [x, *layer.parameters()]

    def run(world):
        y, state = layer(x, parallel=world)
        loss = y.sin().sum() + (0 if state.conv is None else state.conv.cos().sum())
        return [y, *torch.autograd.grad(loss, wrt)]

    whole = run(None)
    for world in (Simulated(4, sizes=(1, 2, 0, 9)), Simulated(3, "headtail")):
        for got, expected in zip(run(world), whole, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_packed_layers_over_ranks_and_states_handed_on():
    layer = mixers.GatedDeltaNet(d_model=16).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 11, 20])
    world = Simulated(4, sizes=(2, 9, 0, 9))
    _, before = layer(torch.randn(1, 9, 16, dtype=torch.float64), cu_seqlens=torch.tensor([0, 2, 4, 9]))
    expected, state = layer(x, before, bounds)
    got, found = layer(x, before, bounds, parallel=world)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(found.conv, state.conv)
    torch.testing.assert_close(found.recurrent, state.recurrent)


@pytest.mark.parametrize(
    "layer", [mixers.RetNet(16), mixers.RWKV7(16), mixers.RGLRU(16)], ids=lambda m: type(m).__name__
)
def test_packings_of_layers_over_ranks(layer):
    layer, bounds = layer.double(), dsf.Packing([0, 3, 3, 11, 20])
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    expected, state = layer(x, cu_seqlens=bounds)
    got, found = layer(x, cu_seqlens=bounds, parallel=Simulated(3, sizes=(4, 0, 16)))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(found, state)


class One(World):
    """One rank alone, whose every collective is answered by the same tensor."""

    here, heard = [0], None

    def run(self, steps, first=()):
        return [drive(one, lambda request: self.heard) for one in steps]


def test_packed_layers_over_ranks_read_their_own_sequences_and_sum_only_states_that_are_wanted():
    """An infinity at the end of a rank, and of a sequence, stays there; without a state, windows and states are sent
    once each way."""
    torch.manual_seed(0)
    world, layer, bounds = Simulated(2), mixers.GatedDeltaNet(16).double(), dsf.Packing([0, 12, 12, 24])
    x = torch.randn(1, 24, 16, dtype=torch.float64, requires_grad=True)
    broken = x.detach().clone()
    broken[0, 11] = torch.inf
    with torch.no_grad():
        expected = layer(x, cu_seqlens=bounds)[0]
        for use_cache in (True, False):
            found = layer(broken, cu_seqlens=bounds, use_cache=use_cache, parallel=world)[0]
            torch.testing.assert_close(found[:, 12:], expected[:, 12:], rtol=1e-9, atol=1e-9)
    kinds = []
    for use_cache in (True, False):
        world.log = []
        y, state = layer(x, cu_seqlens=bounds, use_cache=use_cache, parallel=world)
        torch.autograd.grad(y.sin().sum(), x)
        assert (state is None) is not use_cache
        kinds.append([entry[0] for entry in world.log])
    assert kinds == [["gather", "sum", "gather", "sum", "sum", "gather", "sum", "gather"], ["gather"] * 4]


@pytest.mark.parametrize("bounds", [None, dsf.Packing([0, 5, 12])], ids=["whole", "packed"])
def test_turns_and_previous_values_send_no_final_states_where_none_are_wanted(bounds):
    inputs = {n: x.requires_grad_() for n, x in sample(trapezoid, B=1, T=12).items()}
    whole, _ = trapezoid(**inputs, cu_seqlens=bounds, return_state=True)
    expected = torch.autograd.grad(whole.sin().sum(), list(inputs.values()))
    world = Simulated(2)
    for wanted in (True, False):
        world.log = []
        out = trapezoid(**inputs, cu_seqlens=bounds, return_state=wanted, parallel=world)
        y = out[0] if wanted else out
        grads = torch.autograd.grad(y.sin().sum(), list(inputs.values()))
        for one, other in zip((y, *grads), (whole, *expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        assert ("sum" in {entry[0] for entry in world.log}) is wanted


@pytest.mark.parametrize("recurrence", [gated_delta, stabilised, turned, mixers.s6], ids=lambda r: r.name)
@pytest.mark.parametrize("reverse", [False, True])
def test_later_calls_of_recurrences_are_remembered(recurrence, reverse, monkeypatch):
    """On torch, whole and packed, with states and without: the third call is as right as the first, and none is cut,
    checked and planned again but those of framed declarations, whose plain systems are."""
    inputs, names = sample(recurrence, B=1, T=12), [i.name for i in recurrence.spec.inputs if i.kind.time]
    world, made = Simulated(3), []
    first = calls_over_ranks._first
    monkeypatch.setattr(calls_over_ranks, "_first", lambda *args: made.append(args) or first(*args))
    alike = [n for n in names if inputs[n].shape == inputs[names[0]].shape]
    packings = [(None, 1), (dsf.Packing([0, 3, 3, 9, 12]), 4), (torch.tensor([0, 4, 12]), 2)]

    def run(given, cu, state, **more):
        leaves = {id(x): x.clone().requires_grad_() for x in (*given.values(), *([] if state is None else [state]))}
        start = None if state is None else leaves[id(state)]
        tensors = {n: leaves[id(x)] for n, x in given.items()}
        out = recurrence(**tensors, initial_state=start, cu_seqlens=cu, return_state=True, reverse=reverse, **more)
        loss = out[0].sin().sum() + recurrence.true_state(out[1], out[0].shape[-1]).cos().sum()
        return out[0], *torch.autograd.grad(loss, list(leaves.values()))

    for number in range(3):
        before = len(made)
        for cu, rows in packings:
            state = recurrence(**sample(recurrence, B=rows, T=2), return_state=True)[1] if rows != 2 else None
            for given in (inputs, {**inputs, **dict.fromkeys(alike, inputs[alike[0]])}):
                whole, found = run(given, cu, state), run(given, cu, state, parallel=world)
                for one, other in zip(found, whole, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)
        assert (len(made) > before) is not (number > 0)


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize("pairs", [0, last_tokens.PAIRS], ids=["two parts", "mask"])
def test_later_calls_of_attention_are_remembered(layout, pairs, monkeypatch):
    """By shapes, boundaries, gradients and whether the cache is wanted; one tensor may be several inputs."""
    from dsf.parallel import softmax as over_ranks

    monkeypatch.setattr(last_tokens, "PAIRS", pairs)

    world, softmax = Simulated(2, layout), mixers.softmax_attention
    q, k, v = torch.randn(3, 1, 24, 2, 4, dtype=torch.float64)
    packings = [None, dsf.Packing([0, 5, 5, 19, 24]), dsf.Packing([0, 12, 24])]
    cases = [(cu, given, wanted) for cu in packings for given in ((q, k, v), (q, q, q)) for wanted in (False, True)]
    routes, made = [], over_ranks.route_of
    monkeypatch.setattr(over_ranks, "route_of", lambda *args: routes.append(args) or made(*args))

    def run(given, pull, cu, wanted, **more):
        leaves = {id(x): x.clone().requires_grad_(pull) for x in given}
        out = softmax(*(leaves[id(x)] for x in given), cu_seqlens=cu, return_state=wanted, **more)
        parts = [out]
        if wanted:
            used = out[1].in_use()[:, None, :, None]
            parts = [out[0], *(x.masked_fill(~used, 0.0) for x in out[1][:2])]
        loss = sum((x * torch.arange(1.0, x.shape[-1] + 1)).sin().sum() for x in parts)
        return *parts, *(torch.autograd.grad(loss, list(leaves.values())) if pull else ())

    for _ in range(2):
        for pull in (True, False):
            for cu, given, wanted in cases:
                expected, found = run(given, pull, cu, wanted), run(given, pull, cu, wanted, parallel=world)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert len(routes) == 2 * 6  # with and without gradients; aliases are no other kind


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 8, 12]])
def test_places_of_tokens(layout, bounds):
    """Whatever a rank holds, its positions are those of the whole."""
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    whole = Span(True, cu_seqlens)
    x = torch.arange(12.0).view(1, 12, 1)
    for sizes in (None,) if layout == "headtail" or bounds else (None, (0, 5, 7)):
        for rank in range(3):
            world = One(layout, 3, 1, sizes, "auto", (Link(1e-5, 1e9),) * 2)
            world.here, world.heard = [rank], torch.tensor([[4], [4], [4]])
            (own,) = world.shard_of(rank, x)
            for before in (None, torch.arange(1 if bounds is None else 4) + 5):
                span = Span(True, cu_seqlens, before, places_of(world, own, cu_seqlens, True))
                places, every = own.flatten().long(), whole._replace(before=before)
                assert torch.equal(span.positions(own), every.positions(x)[:, places])
                assert torch.equal(span.starts(own), every.starts(x)[:, places])
                assert torch.equal(span.after(own), every.after(x))
                if before is None:  # else positions are counted
                    uncounted = span._replace(places=places_of(world, own, cu_seqlens, False))
                    assert torch.equal(uncounted.starts(own), every.starts(x)[:, places])


@pytest.mark.parametrize("recurrence", [mixers.softmax_attention, mixers.fox], ids=lambda r: r.name)
def test_attention_in_a_graph_of_any_length(recurrence):
    """What ranks read are numbers, so that a graph is of one length; of another one there is another graph."""
    world = Simulated(2)
    call = torch.compile(
        lambda given: recurrence(**given, parallel=world), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for tokens in (12, 20):
        inputs = sample(recurrence, T=tokens)
        torch.testing.assert_close(call(inputs), recurrence(**inputs), rtol=1e-9, atol=1e-10)


def test_a_guard_looks_at_the_users_calls_alone():
    """Summaries and adjoints are dsf's own declarations: their inputs hold to no range."""
    inputs = {n: x.requires_grad_() for n, x in sample(gated_delta, T=9).items()}
    with dsf.validate():
        gated_delta(**inputs, parallel=Simulated(3)).sum().mul(1e9).backward()
        bad = {**inputs, "v": inputs["v"].detach() * torch.inf}
        with pytest.raises(dsf.InputError, match=r"gated_delta.*`v`"):
            gated_delta(**bad, parallel=Simulated(3))


def test_attach_reaches_every_mixer():
    model = torch.nn.ModuleList([mixers.S6(16), torch.nn.Linear(2, 2), mixers.SoftmaxAttention(16)])
    world = Simulated(2)
    assert attach(model, world) is model and model[0].parallel is world and model[2].parallel is world
    x = torch.randn(1, 8, 16)
    world.log = []
    model[0](x)
    assert world.log
    attach(model, None)
    assert model[0].parallel is None
    with pytest.raises(dsf.InputError, match="no dsf mixer"):
        attach(torch.nn.Linear(2, 2), world)


# ---- what users see ------------------------------------------------------------------------------------------------


def test_a_sequence_of_one_rank_takes_labels():
    """A script for many ranks is tried on one, which has every token's target."""
    config = ModelConfig(d_model=16, n_layers=1, vocab_size=11, mixers=["mingru"])
    model, ids = CausalLM(config).double(), torch.randint(11, (2, 6))
    expected = model(ids, ids).loss
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert torch.equal(attach(model, Sequence())(ids, ids).loss, expected)
    finally:
        dist.destroy_process_group()


def test_layouts():
    sizes = Layout("contiguous", 3).sizes(8)
    assert sizes == [3, 3, 2] and Layout("headtail", 2).sizes(8) == [2, 2, 2, 2]
    x = torch.arange(8)[None]
    for world in (Simulated(2, "headtail"), Simulated(3), Simulated(3, sizes=(0, 1, 7))):
        shards = [world.shard_of(r, x)[0] for r in range(world.ranks)]
        assert torch.equal(world.whole_of(shards), x)
        assert [s[0].tolist() for s in shards] == [world.places(8, r).tolist() for r in range(world.ranks)]
    assert Simulated(2, "headtail").places(8, 0).tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_whole_tensors_of_any_shape_are_gathered(layout, dtype):
    """Token ids and losses have no axis behind T."""
    world = Simulated(2, layout)
    whole = torch.arange(2 * 8 * 3).reshape(2, 8, 3) % 2 + torch.arange(3)
    for x, dim in ((whole, 1), (whole, -2), (whole[..., 0], 1), (whole[..., 0].T, 0), (whole[0, :, 0], 0)):
        shards = [world.shard_of(rank, x.to(dtype), dim=dim)[0] for rank in range(2)]
        for found in gather_tokens(world, shards, [4, 4], dim):
            assert torch.equal(found, x.to(dtype))


def test_gathered_losses_have_gradients():
    world, x = Simulated(3, sizes=(1, 0, 4)), torch.arange(10.0).reshape(2, 5).requires_grad_()
    (whole, *_) = gather_tokens(world, [world.shard_of(r, x)[0] for r in range(3)], [1, 0, 4])
    torch.testing.assert_close(torch.autograd.grad(whole.square().sum(), x)[0], 2 * x)


def test_pieces_of_packed_sequences():
    packing = Packing.of(Layout("contiguous", 3), [0, 2, 2, 7, 9])
    assert packing.starts == (0, 3, 6, 9)
    shown = [[(p.begin, p.end, p.sequence, p.continued, p.goes_on) for p in packing.pieces(r)] for r in range(3)]
    assert shown == [
        [(0, 2, 0, False, False), (2, 3, 2, False, True)],
        [(0, 3, 2, True, True)],
        [(0, 1, 2, True, False), (1, 3, 3, False, False)],
    ]
    assert [packing.is_fresh(n) for n in range(3)] == [True, False, True]
    assert [packing.ends(r) for r in range(3)] == [[0, 1], [], [2, 3]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Simulated(2, "zigzag"), "layouts are contiguous, headtail"),
        (lambda: Simulated(2, exchange="ring"), "exchange is 'ring'"),
        (lambda: Simulated(2, exchange="two-level"), "needs a mesh of two dimensions"),
        (lambda: Simulated(3, sizes=(1, 2)), "tokens of each of 3"),
        (lambda: Simulated(4, nodes=3), "cannot be 3 nodes"),
        (lambda: Sequence(), "init_process_group first"),
        (lambda: gated_delta(**sample(gated_delta), parallel="cp"), "must be a dsf.parallel.Sequence, got str"),
        (lambda: gated_delta(**sample(gated_delta, T=7), parallel=Simulated(2, "headtail")), "7 tokens do not divide"),
        (lambda: gated_delta(**sample(gated_delta, T=7), parallel=Simulated(2, sizes=(3, 3))), "hold 6 tokens"),
        (
            lambda: gated_delta(
                **sample(gated_delta, B=1), cu_seqlens=torch.tensor([0, 4, 3, 6]), parallel=Simulated(2)
            ),
            "must begin with 0 and not fall",
        ),
        (lambda: gated_delta(**sample(gated_delta), cu_seqlens=torch.tensor([0, 6]), parallel=Simulated(2)), "B = 2"),
        (
            lambda: gated_delta(**sample(gated_delta), initial_state=torch.zeros(1), parallel=Simulated(2)),
            "initial_state has shape",
        ),
    ],
)  # fmt: skip
def test_bad_input_gets_one_error(make, text):
    with pytest.raises(dsf.InputError, match=text):
        make()


def test_second_derivatives_are_refused():
    inputs = {k: x.requires_grad_() for k, x in sample(scalar).items()}
    y = scalar(**inputs, parallel=Simulated(2))
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), inputs["q"], create_graph=True)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("how", ["dual", "jvp", "grad", "vmap"])
@pytest.mark.parametrize("recurrence", [gated_delta, turned, mixers.softmax_attention], ids=lambda r: r.name)
def test_transformations_of_torch_func_and_tangents_are_refused(recurrence, how, known):
    """Exchanges would leave out what earlier ranks' tokens do to later ones."""
    inputs, world = sample(recurrence, T=6), Simulated(2)
    if known:
        recurrence(**inputs, parallel=world)

    def call(v):
        return recurrence(**{**inputs, "v": v}, parallel=world)

    v = inputs["v"]
    with pytest.raises(dsf.InputError, match=r"forward-mode derivatives do not pass through parallel="):
        if how == "dual":
            with forward_ad.dual_level():
                call(forward_ad.make_dual(v, torch.ones_like(v)))
        elif how == "jvp":
            torch.func.jvp(call, (v,), (v,))
        elif how == "grad":
            torch.func.grad(lambda v: call(v).sum())(v)
        else:
            torch.func.vmap(call)(v.unsqueeze(0))


def test_channels_that_differ_are_walked():
    assert kind_of_map(mixers.get("longhorn_exact").recurrence.spec) == "channel"
    assert kind_of_map(mixers.s6.spec) == "scale" and kind_of_map(gated_delta.spec) == "dense"
    assert dataclasses.replace(EXAMPLES[0], seed=3).seed == 3
