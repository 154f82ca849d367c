"""The windows of the short convolution over ranks on the kernels, in Triton's interpreter."""

import pytest
import torch
from interpreted import interpreted

from dsf.kernels import convolution
from dsf.kernels.convolution import Piece
from dsf.mixers._conv import ShortConv, TokenShift
from dsf.parallel import Simulated, halo, windows

pytestmark = interpreted


@pytest.fixture
def taken(monkeypatch, counting):
    """Convolutions over ranks run on the kernels, also on a CPU; how many did."""
    chosen = convolution._chosen

    def choose(x, weight, backend, pieces):
        asked = "triton" if x.dtype != torch.float64 and x.numel() else backend
        return chosen(x, weight, asked, pieces)

    monkeypatch.setattr(convolution, "_chosen", choose)
    return counting(windows, "convolve")


def outcome(conv, u, state, world, ends=True):
    """y, the last state, gradients of u, state, weight and bias. ends: of a functional of the last state, too."""
    leaves = [x.detach().requires_grad_() for x in (u, state) if x is not None]
    begun = None if state is None else leaves[1]
    if world is None:
        y, last = conv(leaves[0], begun)
    else:
        y, last = halo.convolve(conv, conv.kernel_size[0] - 1, leaves[0], begun, None, world)
    ys = y if isinstance(y, tuple) else (y,)
    g = torch.Generator().manual_seed(0)
    looked = (*ys, last) if ends else ys
    loss = sum((x.double() * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in looked)
    wanted = [*leaves, *conv.parameters()]
    return [*ys, last, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("given", [False, True], ids=["empty", "state"])
@pytest.mark.parametrize(
    "world",
    [
        Simulated(2, sizes=(9, 8)), Simulated(4, sizes=(1, 2, 5, 1)), Simulated(3, sizes=(2, 1, 1)),
        Simulated(2, layout="headtail"), Simulated(3, layout="headtail"), Simulated(1),
    ],
    ids=["2 ranks", "short", "shorter than the window", "headtail", "headtail of 3", "alone"],
)  # fmt: skip
def test_a_convolution_over_ranks_equals_the_whole(world, given, taken):
    torch.manual_seed(1)
    tokens = sum(world.sizes) if world.sizes else 12
    conv = ShortConv(300, pieces=[Piece(44), Piece(256, 32, 1.0)])
    u, state = torch.randn(2, tokens, 300), torch.randn(2, 300, 3) if given else None
    whole = ShortConv(300, pieces=conv.pieces).double()
    whole.load_state_dict(conv.state_dict())
    expected = outcome(whole, u.double(), None if state is None else state.double(), None)
    found = outcome(conv, u, state, world)
    assert taken[0] == 1
    for got, want in zip(found, expected, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


class Heard(Simulated):
    """Ranks that keep what they send."""

    def _run(self, steps, first=()):
        def kept(rank, one):
            try:
                request = next(one)
                while True:
                    self.sent.append((rank, *request.signature, request.x.detach().clone()))
                    request = one.send((yield request))
            except StopIteration as end:
                return end.value

        return super()._run([kept(rank, one) for rank, one in enumerate(steps)], first)


@pytest.mark.parametrize("layout", ["contiguous", "headtail"])
def test_ranks_with_and_without_kernels_send_the_same(layout, taken, monkeypatch):
    torch.manual_seed(2)
    conv, u, state = ShortConv(5, 3), torch.randn(1, 12, 5), torch.randn(1, 5, 2)
    found = []
    for spreads in (conv.spreads, lambda x: None):
        monkeypatch.setattr(conv, "spreads", spreads)
        world = Heard(2, layout)
        world.sent = []
        outcome(conv, u, state, world, ends=False)  # its gradient is the sum of the ranks', however they share it
        found.append(world.sent)
    assert taken[0] == 1 and len(found[0]) == len(found[1]) == 4  # two ranks, forward and backward
    for (*kind, x), (*other, y) in zip(*found, strict=True):
        assert kind == other
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def test_layers_over_ranks_take_the_kernels(taken):
    """Hooks of the convolution run, and frozen inputs of a layer exchange nothing backward."""
    torch.manual_seed(3)
    conv, hooked = ShortConv(8), []
    conv.register_forward_hook(lambda module, given, out: hooked.append(out[0].shape))
    world = Simulated(2)
    world.log = []
    y, last = halo.convolve(conv, 3, torch.randn(1, 10, 8), None, None, world)
    y.sum().backward()
    assert taken[0] == 1 and hooked == [y.shape] and len(world.log) == 1
    assert conv.weight.grad is not None and conv.bias.grad is not None
    with pytest.raises(Exception, match="second derivatives"):
        u = torch.randn(1, 10, 8, requires_grad=True)
        y, _ = halo.convolve(conv, 3, u, None, None, world)
        (g,) = torch.autograd.grad(y.sum(), u, create_graph=True)
        torch.autograd.grad(g.sum(), u)


def test_half_precision_rounds_once(taken):
    """The gradient of a window's inputs is added before dx is rounded to them: bit for bit as on one GPU."""
    torch.manual_seed(4)
    conv = ShortConv(64, bias=False).bfloat16()
    u = torch.randn(1, 32, 64).bfloat16()
    y, _, du, *_ = outcome(conv, u, None, Simulated(2))
    whole, _, expected, *_ = outcome(conv, u, None, Simulated(1))
    assert torch.equal(y, whole)
    assert ((du - expected).abs() <= 2**-7 * expected.abs() + 1e-2).all()


@pytest.mark.parametrize("bounds", [None, [0, 3, 4, 4, 11]], ids=["one sequence", "packed"])
@pytest.mark.parametrize("sizes", [(4, 1, 6), (0, 2, 9), None], ids=["uneven", "empty", "headtail"])
def test_windows_of_any_convolution(sizes, bounds, monkeypatch):
    """Token shifts, packed sequences and ranks without tokens: kernels fold the windows of other convolutions, too."""
    torch.manual_seed(5)
    folded = []

    def counting(name, run):
        return lambda *args: folded.append(name) or run(*args)

    monkeypatch.setattr(windows, "takes", lambda every: every.dtype == torch.float32)
    monkeypatch.setattr(windows, "entered", counting("entered", windows.entered))
    monkeypatch.setattr(windows, "left", counting("left", windows.left))
    tokens = 12 if sizes is None else 11
    bounds = bounds if bounds is None or sizes else [0, 3, 4, 4, 12]
    world = Simulated(3, sizes=sizes) if sizes else Simulated(2, "headtail")
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    rows = 1 if bounds is None else len(bounds) - 1
    for conv in (TokenShift(5), ShortConv(5, 4)):
        past = conv.kernel_size[0] - 1
        u, state = torch.randn(1, tokens, 5), torch.randn(rows, 5, past)
        found = []
        for dtype, run in ((torch.float64, None), (torch.float32, world)):
            leaves = [x.to(dtype).requires_grad_() for x in (u, state)]
            conv.to(dtype)
            if run is None:
                y, last = conv(*leaves, cu_seqlens)
            else:
                y, last = halo.convolve(conv, past, *leaves, cu_seqlens, world)
            g = torch.Generator().manual_seed(0)
            loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in (y, last))
            found.append([y, last, *torch.autograd.grad(loss, leaves)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert sorted(folded) == ["entered"] * 2 * world.ranks + ["left"] * 2 * world.ranks


def test_an_infinity_stays_where_it_is():
    """Windows are moved, not multiplied, so that nothing is rounded and an infinite token is no other token's."""
    conv, u = TokenShift(2), torch.ones(1, 9, 2)
    u[0, 2, 0] = torch.inf
    y, last = halo.convolve(conv, 1, u, None, None, Simulated(3))
    expected, final = conv(u)
    assert torch.equal(y, expected) and torch.equal(last, final)
