"""The fused short convolution in Triton's interpreter, against its definition in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted

from dsf.kernels.convolution import Piece, short_convolution, short_convolution_step
from dsf.kernels.norm import gated_rms_norm

pytestmark = interpreted


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Runs of a few tokens and blocks of a few channels, so that small inputs cross several of both."""
    from dsf.kernels.triton.layer import table

    def small(widths, tokens, batch, size, taps, backward):
        return table.Tile(8, 8 + taps - 1 if backward else 8, 4 if backward else 8, 1)

    monkeypatch.setattr(table, "convolution", small)


def definition(x, weight, bias, state, activation, pieces):
    """One sequence x [T, C] after state [C, K-1]: (pieces of y, state)."""
    taps = weight.shape[1]
    rows = torch.cat([state.T, x])
    z = torch.stack([(rows[t : t + taps].T * weight).sum(1) for t in range(len(x))]) if len(x) else x
    y = z if bias is None else z + bias
    y = F.silu(y) if activation == "silu" else y
    parts = []
    for part, p in zip(y.split([p.width for p in pieces], -1), pieces, strict=True):
        if p.head:
            heads = part.unflatten(-1, (-1, p.head))
            part = (p.scale * heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)
        parts.append(part)
    return parts, rows[len(rows) - taps + 1 :].T


def expected(x, weight, bias, state, bounds, activation, pieces):
    cuts = list(pairwise(bounds)) if bounds else [(0, x.shape[1])] * x.shape[0]
    rows = [x[0, a:b] if bounds else x[i] for i, (a, b) in enumerate(cuts)]
    if state is None:
        state = x.new_zeros(len(rows), x.shape[2], weight.shape[1] - 1)
    found = [definition(r, weight, bias, s, activation, pieces) for r, s in zip(rows, state, strict=True)]
    ys = [
        torch.cat(parts)[None] if bounds else torch.stack(parts) for parts in zip(*(f[0] for f in found), strict=True)
    ]
    return ys, torch.stack([f[1] for f in found])


def given(batch, tokens, channels, taps, bias, sequences, dtype=torch.float32):
    g = torch.Generator().manual_seed(tokens)

    def draw(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype).double()

    x, weight = draw(batch, tokens, channels + 5)[..., 3 : 3 + channels], draw(channels, taps)
    state = draw(sequences, channels, taps - 1) if sequences else None
    return x, weight, draw(channels) if bias else None, state


def outcome(run, tensors, dtype, finals=True):
    """Outputs, final state and the gradients of a fixed functional of all of them, in float64."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
    wide = torch.randn(*leaves[0].shape[:2], 7, dtype=dtype)
    whole = torch.cat([wide, leaves[0]], -1)  # as a slice of a projection lies
    ys, final = run(whole[..., 7:], *leaves[1:])
    g = torch.Generator().manual_seed(1)
    out = [*ys, final] if finals else [*ys]
    slopes = [torch.randn(y.shape, generator=g).bfloat16().to(dtype) for y in out]
    return [*ys, final, *torch.autograd.grad(out, [x for x in leaves if x is not None], slopes)]


def assert_near(found, wanted, tolerance):
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, i
        if b.numel():
            assert (a.double() - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3), i


CASES = [  # batch, tokens, channels, taps, bias, state, bounds, activation, pieces, with a gradient of the final state
    (2, 11, 11, 4, True, True, None, "silu", None, True),
    (1, 1, 3, 4, False, False, None, "silu", None, True),
    (2, 2, 8, 4, False, True, None, None, None, False),
    (1, 19, 16, 2, True, False, None, "silu", (Piece(8), Piece(8)), False),
    (1, 10, 20, 8, True, True, None, "silu", (Piece(8, 4, 0.5), Piece(4, 4), Piece(8)), False),
    (1, 31, 8, 4, True, True, (0, 0, 1, 1, 3, 9, 9, 30, 31, 31), "silu", None, True),
    (1, 13, 16, 3, False, False, (0, 7, 8, 13), None, (Piece(4, 2), Piece(12)), False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"K{c[3]}-T{c[1]}-{'packed' if c[6] else 'B'}")
def test_forward_and_all_gradients_are_the_definitions(case):
    batch, tokens, channels, taps, bias, state, bounds, activation, pieces, finals = case
    sequences = 0 if not state else len(bounds) - 1 if bounds else batch
    tensors = given(batch, tokens, channels, taps, bias, sequences)
    pieces = pieces or (Piece(channels),)
    cuts = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)

    def fused(x, weight, bias, state):
        return short_convolution(x, weight, bias, state, cuts, activation, pieces, backend="triton")

    def torch_form(x, weight, bias, state):
        return short_convolution(x, weight, bias, state, cuts, activation, pieces, backend="torch")

    wanted = outcome(lambda *t: expected(*t, bounds, activation, pieces), tensors, torch.float64, finals)
    assert_near(outcome(torch_form, tensors, torch.float64, finals), wanted, 1e-9)
    assert_near(outcome(fused, tensors, torch.float32, finals), wanted, 2e-5)


def odd(x):
    """x with a gap behind every number."""
    return torch.stack([x, torch.full_like(x, 9)], -1)[..., 0]


def test_parameters_states_and_boundaries_of_any_strides():
    bounds, pieces = (0, 0, 4, 9), (Piece(8),)
    tensors = given(1, 9, 8, 4, True, 3)
    cuts = odd(torch.tensor(bounds, dtype=torch.int32))

    def fused(x, *rest):
        return short_convolution(x, *map(odd, rest), cuts, "silu", pieces, "triton")

    wanted = outcome(lambda *t: expected(*t, bounds, "silu", pieces), tensors, torch.float64)
    for _ in range(3):
        assert_near(outcome(fused, tensors, torch.float32), wanted, 2e-5)
    x, weight, bias, state = given(2, 1, 8, 4, True, 2)
    (wanted,), last = expected(x, weight, bias, state, None, "silu", pieces)
    (y,), new = short_convolution_step(*(odd(y.float()) for y in (x, weight, bias, state)), backend="triton")
    assert_near([y, new], [wanted, last], 2e-5)


def test_later_calls_with_other_numbers_are_bit_for_bit_the_first():
    """The second call of a kind is written down, the third played."""

    def fused(x, weight, bias, state):
        return short_convolution(x, weight, bias, state, None, pieces=(Piece(4, 4), Piece(4)), backend="triton")

    tensors, others = given(1, 9, 8, 4, True, 1), given(1, 9, 8, 4, True, 1)
    others[0].mul_(2)
    first = outcome(fused, tensors, torch.float32)
    for _ in range(2):
        outcome(fused, others, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, outcome(fused, tensors, torch.float32), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_err_by_one_rounding(dtype):
    def fused(x, weight, bias, state):
        return short_convolution(x, weight, bias, state, None, pieces=(Piece(8, 4, 0.5), Piece(8)), backend="triton")

    tensors = given(1, 16, 16, 4, True, 1, dtype)
    pieces = (Piece(8, 4, 0.5), Piece(8))
    wanted = outcome(lambda *t: expected(*t, None, "silu", pieces), tensors, torch.float64)
    for a, b in zip(outcome(fused, tensors, dtype), wanted, strict=True):
        assert a.dtype == dtype
        rounding = (b.to(dtype).double() - b).abs().mean()
        assert (a.double() - b).abs().mean() <= 1.5 * rounding + 1e-9


def test_parameters_of_another_dtype_are_read_as_they_are():
    """As under autocast: x in bfloat16, weight and bias in float32, and their gradients with it."""
    x, weight, bias, _ = given(1, 9, 8, 4, True, 0, torch.bfloat16)
    weight, bias = weight.float().requires_grad_(), bias.float().requires_grad_()
    (y,), final = short_convolution(x.bfloat16(), weight, bias, backend="triton")
    assert y.dtype == final.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("in_place", [False, True])
def test_steps_are_the_whole(in_place):
    x, weight, bias, state = (t.float() for t in given(2, 5, 20, 4, True, 2))
    pieces = (Piece(12, 4, 0.5), Piece(8))
    whole, last = short_convolution(x, weight, bias, state, pieces=pieces, backend="triton")
    found, now = [], state.clone()
    for t in range(5):
        before = now
        ys, now = short_convolution_step(x[:, t : t + 1], weight, bias, now, "silu", pieces, in_place, "triton")
        assert (now is before) == in_place
        found.append(ys)
    for y, parts in zip(whole, zip(*found, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(now, last)
    ys, _ = short_convolution_step(x[:, :1], weight, bias, None, "silu", pieces, False, "triton")  # nothing before it
    fresh, _ = short_convolution(x[:, :1], weight, bias, None, pieces=pieces, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(ys, fresh, strict=True))


def test_pieces_cut_anywhere_are_the_whole():
    x, weight, bias, state = (t.float() for t in given(2, 21, 6, 4, True, 2))
    (whole,), last = short_convolution(x, weight, bias, state, backend="triton")
    ys, now = [], state
    for low, high in pairwise((0, 2, 3, 11, 21)):
        (y,), now = short_convolution(x[:, low:high], weight, bias, now, backend="triton")
        ys.append(y)
    assert torch.equal(torch.cat(ys, 1), whole) and torch.equal(now, last)


# Programs have 8 tokens forward and 16 backward, and up to 128 channels.
AHEAD = [(2, 37, 5, 7, 3, False), (1, 3, 40, 7, 3, True), (3, 41, 12, 4, 1, True), (2, 1, 8, 5, 4, False),
         (1, 37, 130, 8, 7, True)]  # fmt: skip


@pytest.mark.parametrize("case", AHEAD, ids=str)
def test_outputs_that_read_later_tokens_and_all_gradients_are_the_definitions(case):
    """Batch, tokens, channels, taps, later tokens, bias; two pieces; the tokens in something longer; the third call."""
    batch, tokens, channels, taps, ahead, bias = case
    longer = torch.randn(batch, tokens + 2, channels + 3, requires_grad=True)
    weight, added = torch.randn(channels, taps, requires_grad=True), torch.randn(channels, requires_grad=True)
    pieces, slope = [Piece(channels - 2), Piece(2)], torch.randn(batch, tokens, channels)
    leaves = [longer, weight, *([added] if bias else [])]

    def run(backend, leaves):
        x, weight, *added = leaves
        how = {"pieces": pieces, "backend": backend, "ahead": ahead}
        ys, final = short_convolution(x[:, 1:-1, 3:], weight, *added, **how)
        assert final.shape[0] == 0
        y = torch.cat(ys, -1)
        return [y, *torch.autograd.grad(y, leaves, slope.to(y.dtype))]

    wide = [t.detach().double().requires_grad_() for t in leaves]
    x, exact = wide[0][:, 1:-1, 3:], torch.zeros(batch, tokens, channels, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1 - ahead, ahead))
    for j in range(taps):
        exact = exact + wide[1][:, j] * padded[:, j : j + tokens]
    exact = torch.nn.functional.silu(exact + wide[2] if bias else exact)
    wanted = [exact, *torch.autograd.grad(exact, wide, slope.double())]
    for _ in range(3):
        found = run("triton", leaves)
    for a, b, c in zip(found, wanted, run("torch", leaves), strict=True):
        scale = b.abs().max()
        assert (a.double() - b).abs().max() <= 3e-6 * scale and (c.double() - b).abs().max() <= 3e-6 * scale


def test_what_reads_later_tokens_has_no_state_and_packs_nothing():
    x, weight = torch.randn(1, 5, 4), torch.randn(4, 3)
    for more in ({"state": torch.zeros(1, 4, 2), "ahead": 1}, {"cu_seqlens": torch.tensor([0, 5]), "ahead": 1},
                 {"ahead": 3}, {"ahead": -1}):  # fmt: skip
        with pytest.raises(ValueError, match="later tokens"):
            short_convolution(x, weight, **more)


def test_operators_pass_opcheck():
    from dsf.kernels.triton.layer import convolution_ops as ops
    from dsf.kernels.triton.layer.mixture import mix_tokens
    from dsf.kernels.triton.layer.norm_ops import added_norm, gated_norm
    from dsf.kernels.triton.layer.rotary import turn_pairs

    x, weight, bias, state = (t.float().requires_grad_() for t in given(2, 5, 8, 4, True, 2))
    options = (True, [4, 4], [4, 0], [0.5, 1.0])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.short_convolution, (x, weight, bias, state, None, *options, 0), test_utils=tests)
    with torch.no_grad():
        step = (x[:, :1], weight, bias, state, *options)
        torch.library.opcheck(ops.short_convolution_step, step, test_utils=tests)
        torch.library.opcheck(ops.short_convolution_step_in_place, step, test_utils=tests)
    y, gate, scale = (torch.randn(2, 3, 2, 8, requires_grad=True) for _ in range(3))
    rest = 8, True, False, 0, 1e-5, torch.float32
    torch.library.opcheck(gated_norm, (y, gate, scale[0, 0, 0].detach(), *rest), test_utils=tests)
    torch.library.opcheck(added_norm, (y, gate, scale[0, 0, 0].detach(), 1e-5, torch.float32), test_utils=tests)
    angle = torch.randn(1, 3, 4)
    torch.library.opcheck(turn_pairs, (y, gate, angle.cos(), angle.sin(), 0.5, False), test_utils=tests)
    x, other = (t.detach().flatten(2).requires_grad_() for t in (y, gate))
    torch.library.opcheck(mix_tokens, (x, other, [torch.rand(16, requires_grad=True)] * 2, None), test_utils=tests)


def test_compiled_whole_they_are_the_same():
    x, weight, bias, state = given(1, 6, 8, 4, True, 1)
    scale = torch.randn(4, generator=torch.Generator().manual_seed(3))

    def layer(x, weight, bias, state):
        (q, gate), final = short_convolution(x, weight, bias, state, pieces=(Piece(4, 4), Piece(4)), backend="triton")
        return (gated_rms_norm(q, scale, gate, backend="triton"),), final

    def step(x, weight, bias, state):
        return short_convolution_step(x[:, :1], weight, bias, state.clone(), "silu", None, True, "triton")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    wanted = outcome(layer, (x, weight, bias, state), torch.float32)
    for a, b in zip(outcome(compiled, (x, weight, bias, state), torch.float32), wanted, strict=True):
        torch.testing.assert_close(a, b)
    one = tuple(t.float() for t in (x, weight, bias, state))
    with torch.no_grad():
        ((y,), new), ((z,), other) = step(*one), torch.compile(step, fullgraph=True, backend="aot_eager")(*one)
    assert torch.equal(y, z) and torch.equal(new, other)


def test_second_derivatives_are_refused_in_words():
    x, weight, bias, _ = given(1, 4, 4, 4, True, 0)
    x = x.float().requires_grad_()
    (y,), _ = short_convolution(x, weight.float(), bias.float(), backend="triton")
    with pytest.raises(RuntimeError, match=r"second derivatives .* backend='torch'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_does_not_fit_is_refused_in_words():
    x, weight = torch.randn(1, 4, 6), torch.randn(6, 9)
    with pytest.raises(ValueError, match="2 to 8 taps"):
        short_convolution(x, weight, backend="triton")
    with pytest.raises(ValueError, match="whole heads"):
        short_convolution(x, weight, pieces=(Piece(6, 4),))
    with pytest.raises(ValueError, match="activation is 'relu'"):
        short_convolution(x, weight, activation="relu")
    with pytest.raises(ValueError, match="overwrites the state"):
        short_convolution_step(x[:, :1], weight, in_place=True)
    with pytest.raises(ValueError, match="takes one token"):
        short_convolution_step(x, weight[:, :4], backend="triton")


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_sizes_that_do_not_fit_are_refused(backend):
    x, weight, bias, state = torch.randn(2, 4, 6), torch.randn(6, 4), torch.randn(6), torch.randn(2, 6, 3)
    cuts = torch.tensor([0, 1, 4])
    for given in [
        (weight[:1], None), (weight, bias[:1]), (weight, bias, state[:1]), (weight, bias, state[..., :2]),
        (weight, bias, state, cuts),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="sizes do not fit; expected"):
            short_convolution(x, *given, backend=backend)
        if len(given) == 3:
            with pytest.raises(ValueError, match="sizes do not fit; expected"):
                short_convolution_step(x[:, :1], *given, backend=backend)
