"""mLSTM, the matrix memory of xLSTM."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import dsf
from dsf import Expr, Key, N, Param, Scalar, System, Value, abs, exp, maximum, sigmoid, silu
from dsf.kernels.product import by_blocks, linear
from dsf.language.errors import InputError
from dsf.mixers._beside import hooked, loaded, product_of
from dsf.mixers._conv import ShortConv
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import gated, layer_norm
from dsf.mixers._own import Owner, StartLinear, normal

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def mlstm(q: Key, k: Key, v: Value, i: Scalar, f: Scalar) -> System:
    """mLSTM: a scalar forget gate, an exponential input gate, and a quotient bounded from below.

    Source: Beck et al. (arXiv 2405.04517), equations 19-27; of its two forget gates, the sigmoid. The running
    maximum that keeps e^i finite is part of the computation, not of the system. Symbols: i, f are
    pre-activations.
    Objective: one gradient step of -<S'k_t, v_t> with rate e^i, with weight decay on S.
    """
    return System(
        A=sigmoid(f),
        B=exp(i) * k * v,
        C=q * N**-0.5,
        normalize=lambda num, den, one: num / maximum(abs(den), one),
    )


def _read_by_torch(y: Tensor, u: Tensor, weight: Tensor, skip: Tensor) -> Tensor:
    return torch.addcmul(skip * u, F.layer_norm(y, y.shape[-1:]), weight)


@dsf.tokenwise(by_torch=_read_by_torch)
def read(y: Key, u: Key, weight: Param[Key], skip: Param[Key]) -> Expr:
    """What the layer computes from y without a gate: LayerNorm of each head, plus skip times the convolved u."""
    return layer_norm(y) * weight + skip * u


@dsf.tokenwise(by_torch=lambda y, u, weight, skip, z: gated(_read_by_torch(y, u, weight, skip), z))
def gated_read(y: Key, u: Key, weight: Param[Key], skip: Param[Key], z: Key) -> Expr:
    """The same, times silu(z)."""
    return (layer_norm(y) * weight + skip * u) * silu(z)


class Blocks(Owner):
    """A linear map of consecutive blocks of channels, without bias. weight: [blocks, width, width], outputs first."""

    weight: Tensor

    def __init__(self, blocks: int, width: int):
        super().__init__()
        self.own("weight", partial(normal, std=(2 / (5 * width)) ** 0.5), blocks, width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, channels] -> the same shape."""
        return torch.einsum("btgi,goi->btgo", x.unflatten(-1, self.weight.shape[:2]), self.weight).flatten(2)

    def whole(self, heads: int) -> Tensor:
        """The map of a head's channels as one matrix, zeros between blocks: [H, P, P], inputs first."""
        each = self.weight.unflatten(0, (heads, -1)).permute(0, 3, 2, 1)  # [H, inputs, outputs, blocks]
        return torch.diag_embed(each, dim1=1, dim2=3).flatten(3).flatten(1, 2)

    def before(self, weight: Tensor) -> Tensor:
        """The weight [out, channels] of the map that applies this one first and then one of that weight."""
        rows = weight.unflatten(1, (len(self.weight), -1))
        return torch.einsum("ogj,gji->ogi", rows, self.weight).flatten(1)


def _by(x: Tensor, heads: int) -> Tensor:
    """[B, T, H · P] -> [B, T, H, P]."""
    return x.unflatten(-1, (heads, -1))


def mapped(x: Tensor, heads: int, gates: Tensor, *maps: Blocks) -> list[Tensor]:
    """x [B, T, H · P] times `gates` [out, H · P]: [B, T, out]; and what each of the maps makes of x: [B, T, H, P].

    On a GPU as matrix products of whole heads, since blocks are too narrow for its matrix units; not where blocks reach
    from one head into the next.
    """
    whole = x.is_cuda and x.shape[1] > 1 and len(maps[0].weight) % heads == 0
    return by_head(x, heads, gates, *maps) if whole else by_block(x, heads, gates, *maps)


def by_block(x: Tensor, heads: int, gates: Tensor, *maps: Blocks) -> list[Tensor]:
    """`mapped` by products of the blocks."""
    return [F.linear(x, gates), *(_by(m(x), heads) for m in maps)]


def by_head(x: Tensor, heads: int, gates: Tensor, *maps: Blocks) -> list[Tensor]:
    """`mapped` by products of whole heads, whose matrices have zeros between blocks."""
    rows, weights = x.flatten(0, 1).unflatten(-1, (heads, -1)), [m.whole(heads).to(x.dtype) for m in maps]
    run = _ByHead.forward_alone if torch.compiler.is_compiling() else _ByHead.apply
    return [y.unflatten(0, x.shape[:2]) for y in run(rows, gates.to(x.dtype), *weights)]


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, H, P] times weight [H, P, Q]: [rows, H, Q]; without gradients written as it is read, with no copy."""
    if torch.is_grad_enabled():
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    found = x.new_empty(*x.shape[:2], weight.shape[2])
    torch.bmm(x.transpose(0, 1), weight, out=found.transpose(0, 1))
    return found


class _ByHead(torch.autograd.Function):
    """A product with `gates` and several `_products` of the same x, whose gradient is one sum."""

    @staticmethod
    def forward_alone(x: Tensor, gates: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return x.flatten(1) @ gates.mT, *(_products(x, w) for w in weights)

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, gates, *weights)
        return _ByHead.forward_alone(x, gates, *weights)

    @staticmethod
    def backward(ctx: Any, dgated: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        x, gates, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx = (dgated @ gates).view_as(x)
            for dy, weight in zip(given, weights, strict=True):
                dx = dx + _products(dy, weight.mT)
        else:
            dx = _products(given[0], weights[0].mT)
            for dy, weight in zip(given[1:], weights[1:], strict=True):
                dx.transpose(0, 1).baddbmm_(dy.transpose(0, 1), weight.mT)
            dx.flatten(1).addmm_(dgated, gates)
        rows = x.permute(1, 2, 0)
        return dx, dgated.mT @ x.flatten(1), *(torch.bmm(rows, dy.transpose(0, 1)) for dy in given)


class Gates(Owner):
    """The map to the pre-activations of input and forget gates; its weight begins at zero, so these are constants."""

    weight: Tensor
    bias: Tensor

    def __init__(self, d_in: int, n_heads: int):
        super().__init__()
        self.own("weight", torch.zeros, 2 * n_heads, d_in)
        self.own("bias", _gate_bias, 2 * n_heads, kind="vector")

    @staticmethod
    def before(weight: Tensor, q: Blocks, k: Blocks, v: Blocks) -> tuple[Tensor, Tensor]:
        """Their weights [2 · n_heads, d_in / 3] for what q's and k's maps take and for what v's map takes.

        They see q, k and v. The maps are multiplied into their weights, so that q, k and v are not copied side by side
        and read again.
        """
        of_q, of_k, of_v = weight.chunk(3, dim=1)
        return q.before(of_q) + k.before(of_k), v.before(of_v)

    def forward(self, products: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, T, 2 · n_heads], input gates first. products: a function of the weight, its products with what the gates
        see. It is called in here, since hooks (pruning) make the weight first; ranks sum the products up (`cut`)."""
        found = products(self.weight)
        return found + self.bias.to(found.dtype)


def _gate_bias(size: int) -> Tensor:
    """Input gates near e^0, forget gates from sigmoid(3) to sigmoid(6) over the heads."""
    return torch.cat([0.1 * torch.randn(size // 2), torch.linspace(3.0, 6.0, size // 2)])


class MLSTM(Mixer):
    """The mLSTM block: up-projection to (u, z), convolution and SiLU before q and k, a learnt skip, gate silu(z).

    Source: Beck et al. (arXiv 2405.04517), Figure 11 and Appendix D. expand · d_model channels in n_heads heads.
    Block-diagonal maps, with blocks of qkv_block channels, make q and k of the convolved u, and v of u itself. The
    gates are maps of q, k and v. Each head has a LayerNorm without bias. At start: forget biases from 3 to 6, input
    biases normal(0, 0.1), gate weights zero, other weights normal with variance 2 / (5 fan_in), the skip one. Left out:
    the depth-scaled init of down_proj. bare: neither convolution nor z.
    """

    recurrence = mlstm
    beside = ("up_proj",)
    skip: Tensor
    norm: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        expand: float = 2,
        d_conv: int = 4,
        qkv_block: int = 4,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        n_heads, width = self.heads(d_model, n_heads, expand=(d_inner, None))
        if d_inner % qkv_block:
            raise InputError(f"MLSTM: qkv_block ({qkv_block}) must divide expand·d_model = {d_inner}")
        self.dims = (n_heads, width, width)
        start = partial(normal, std=(2 / (5 * d_model)) ** 0.5)
        self.up_proj = StartLinear(d_model, d_inner if bare else 2 * d_inner, start)
        self.conv1d = None if bare or not d_conv else ShortConv(d_inner, d_conv)
        self.q_proj = Blocks(d_inner // qkv_block, qkv_block)
        self.k_proj = Blocks(d_inner // qkv_block, qkv_block)
        self.v_proj = Blocks(d_inner // qkv_block, qkv_block)
        self.gates = Gates(3 * d_inner, n_heads)
        self.own("skip", torch.ones, d_inner, kind="vector")
        self.own("norm", torch.ones, d_inner, kind="vector")
        self.down_proj = StartLinear(d_inner, d_model, partial(normal, std=(2 / (5 * d_inner)) ** 0.5))
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        heads, channels = to.over_heads(blocks=len(self.q_proj.weight)), self.down_proj.in_features
        to.rows(self.up_proj, *[channels] * (self.up_proj.out_features // channels))
        to.conv(self.conv1d)
        for blocks in (self.q_proj, self.k_proj, self.v_proj):
            to.own(blocks, "weight")
        to.mixed(self.gates, channels, channels, channels, kept=(heads, heads))  # every gate sees every channel
        to.own(self, "skip", "norm")
        to.summed(self.down_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        u, *z = self.first_map(x, self.up_proj).split(self.down_proj.in_features, dim=-1)
        return u, (u, *z)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        with loaded(self.q_proj, self.k_proj, self.v_proj):
            return self._arguments(u, side[0])

    def _arguments(self, u: Tensor, raw: Tensor) -> dict[str, Tensor]:
        heads, maps, xs = self.dims[0], (self.q_proj, self.k_proj, self.v_proj), (u, u, raw)
        plain = all(type(m) is Blocks and not hooked(m) for m in maps)
        token = u.shape[1] == 1 and not torch.is_grad_enabled()  # launches are what it costs, not copies
        if token or not plain:  # gates see what hooked and pruned maps make
            if plain:
                every = by_blocks(xs, [m.weight for m in maps])
            else:
                every = torch.cat([m(x) for m, x in zip(maps, xs, strict=True)], -1)
            i, f = self.gates(lambda weight: linear(every, weight, ahead=True)).chunk(2, -1)
            return {**{name: _by(x, heads) for name, x in zip("qkv", every.chunk(3, -1), strict=True)}, "i": i, "f": f}
        made: list[Tensor] = []

        def products(weight: Tensor) -> Tensor:
            seen, seen_raw = Gates.before(weight, *maps)
            of_u, *qk = mapped(u, heads, seen, *maps[:2])
            of_raw, v = mapped(raw, heads, seen_raw, maps[2])
            made.extend((*qk, v))
            return of_u + of_raw

        i, f = self.gates(products).chunk(2, -1)
        return {**dict(zip("qkv", made, strict=True)), "i": i, "f": f}

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        return (*side[1:], u)

    def readout(self, y: Tensor, side: Side) -> Tensor:
        *gates, u = side
        fixed = (w.view(y.shape[2:]) for w in (self.norm, self.skip))
        known = y, u.view_as(y), *fixed
        y = gated_read(*known, *(z.view_as(y) for z in gates)) if gates else read(*known)
        return product_of(y.flatten(2), self.down_proj)
