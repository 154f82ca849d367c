"""Mamba-3: a trapezoid in time, transitions that turn, decays that tokens choose."""

import math
from functools import lru_cache, partial
from operator import mul
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import dsf
from dsf import (
    I,
    Key,
    Pair,
    Param,
    Recurrence,
    Scalar,
    Steps,
    System,
    Value,
    compose,
    exp,
    maximum,
    prev,
    sigmoid,
    softplus,
    tanh,
    turn,
)
from dsf.language.errors import InputError
from dsf.language.expr import Expr
from dsf.language.operator import Operator
from dsf.mixers._beside import product_of
from dsf.mixers._conv import split_heads
from dsf.mixers._mamba import grouped, whole_group
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm, gated
from dsf.mixers._own import full, time_step

if TYPE_CHECKING:
    from dsf.parallel import Cuts

A_FLOOR = 1e-4  # every head forgets
RANK = 4  # of writes and reads, as in mamba_ssm


def _transition(delta: Expr, a: Expr, angle: Expr) -> Operator:
    """The decay and the turn of a step delta; by an angle below 0 it turns the other way round."""
    return exp(-(maximum(softplus(a), A_FLOOR) * delta)) * turn(delta * (math.pi * tanh(angle)))


def _trapezoid(x: Expr, b: Expr, c: Expr, delta: Expr, a: Expr, share: Expr, angle: Expr, D: Expr) -> System:
    """A trapezoid over two tokens: delta is the step, share its rule."""
    a_t = _transition(delta, a, angle)
    before = System(A=I, B=prev(b * x) * ((1 - share) * delta))  # decays and turns with the state
    return compose(before, System(A=a_t, B=b * (share * delta * x), C=c, D=D * x))


@dsf.recurrence
def mamba3(
    x: Value, dt: Scalar, a: Scalar, lam: Scalar, angle: Pair, b: Key, c: Key, D: Param[Scalar], dt_bias: Param[Scalar]
) -> System:
    """Mamba-3 (SISO): the state turns in pairs as it decays, and writes enter by a trapezoid over two tokens.

    Source: Lahoti et al. (arXiv 2603.15569), Propositions 1 and 4; angles and decays as in the released code.
    Symbols: dt, a, lam, angle are pre-activations; Delta = softplus(dt + dt_bias), the decay exp(-Delta softplus(a)),
    pairs of places turn by Delta pi tanh(angle), and sigmoid(lam) = 1 is Euler's rule, 1/2 the trapezoid.
    """
    return _trapezoid(x, b, c, softplus(dt + dt_bias), a, sigmoid(lam), angle, D)


@dsf.recurrence
def mamba3_biased(
    x: Value, dt: Scalar, a: Scalar, lam: Scalar, angle: Pair, b: Key, c: Key, D: Param[Scalar],
    dt_bias: Param[Scalar], b_bias: Param[Key], c_bias: Param[Key],
) -> System:  # fmt: skip
    """Mamba-3 (SISO) with a bias a head on keys and queries, which heads may share, as its layer runs it.

    Source and symbols: as in mamba3, but for the turn, which goes the other way round in mamba_ssm.
    """
    return _trapezoid(x, b + b_bias, c + c_bias, softplus(dt + dt_bias), a, sigmoid(lam), -angle, D)


@lru_cache
def mamba3_mimo_of(rank: int) -> Recurrence:
    """Mamba-3 with `rank` writes and reads a token (MIMO), which share the state, its decay and its turn."""

    @dsf.recurrence(name="mamba3_mimo" if rank == RANK else f"mamba3_mimo{rank}")
    def mimo(
        x: Steps[Value, rank], g: Steps[Value, rank], dt: Scalar, a: Scalar, lam: Scalar, angle: Pair,
        b: Steps[Key, rank], c: Steps[Key, rank], D: Param[Scalar], dt_bias: Param[Scalar],
    ) -> System:  # fmt: skip
        """Mamba-3 (MIMO): several inputs are written and several outputs read a token, their sum weighted by channel.

        Source: Lahoti et al. (arXiv 2603.15569), the multi-input, multi-output state update. Symbols: as in mamba3, but
        for the turn, which goes the other way round, as in mamba_ssm; g: weights of the outputs, such as a gate.
        """
        delta, share = softplus(dt + dt_bias), sigmoid(lam)
        a_t, pairs = _transition(delta, a, -angle), list(zip(b, x, strict=True))
        before = [System(A=I, B=prev(k * v) * ((1 - share) * delta)) for k, v in pairs]
        *now, last = [System(A=I if r else a_t, B=k * (share * delta * v)) for r, (k, v) in enumerate(pairs)]
        read, through = (sum(map(mul, part, g)) for part in (c, x))
        return compose(*before, *now, System(A=last.A, B=last.B, C=read, D=D * through))

    return mimo


mamba3_mimo = mamba3_mimo_of(RANK)


class Mamba3(Mixer):
    """The Mamba-3 block. Parameter names, shapes and init as mamba_ssm's `Mamba3`.

    in_proj gives z, x, B, C and the pre-activations of Delta, A, lambda and the angles, which all heads share; B and C
    pass an RMSNorm and get a bias a head, which starts at 1. rope_fraction of the key entries turn, 0.5 or 1. There is
    no short convolution: the trapezoid and the biases take its place. Then gate silu(z) and out_proj; is_outproj_norm:
    an RMSNorm a head before that gate. bare: no z.

    is_mimo: mimo_rank writes and reads a token (MIMO). There are as many B and C a group; mimo_x, mimo_z and mimo_o
    [heads, rank, headdim] weigh x, z and the outputs by channel. Key entry i turns with entry i + d_state / 2, as in
    mamba_ssm's kernels, where it turns with its neighbour otherwise. Without is_outproj_norm.
    """

    recurrence = mamba3_biased
    beside = ("in_proj",)
    D: Tensor
    dt_bias: Tensor
    B_bias: Tensor
    C_bias: Tensor
    mimo_x: Tensor
    mimo_z: Tensor
    mimo_o: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: int = 2,
        headdim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = RANK,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        d_inner = self.inner(d_model, expand)
        heads = self.inner_heads(d_inner, headdim, n_groups)
        if rope_fraction not in (0.5, 1.0) or d_state % 2 or int(d_state * rope_fraction) < 2:
            raise InputError(
                f"Mamba3: rope_fraction is 0.5 or 1.0 of an even d_state, got {rope_fraction} of {d_state}"
            )
        if is_mimo and is_outproj_norm:
            raise InputError(
                "Mamba3: is_outproj_norm would normalise each of is_mimo's outputs, which are added at once"
            )
        self.dims = (heads, d_state, headdim)
        self.n_groups = n_groups
        self.rank = mimo_rank if is_mimo else 1
        self.angles = int(d_state * rope_fraction) // 2
        keys = self.rank * n_groups * d_state
        self.widths = [0 if bare else d_inner, d_inner + 2 * keys, heads, heads, heads, self.angles]
        self.split = (heads, headdim, *(self.rank * n_groups, d_state) * 2)  # x, B, C
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        self.own("dt_bias", partial(time_step, dt_min=dt_min, dt_max=dt_max), heads, kind="rate")
        self.own("B_bias", torch.ones, heads, self.rank, d_state)
        self.own("C_bias", torch.ones, heads, self.rank, d_state)
        self.is_mimo = is_mimo
        if is_mimo:
            self.recurrence = mamba3_mimo_of(mimo_rank)
            self.own("mimo_x", partial(full, value=1 / mimo_rank), heads, mimo_rank, headdim)
            if not bare:
                self.own("mimo_z", torch.ones, heads, mimo_rank, headdim)
            self.own("mimo_o", partial(full, value=1 / mimo_rank), heads, mimo_rank, headdim)
        self.B_norm = GatedRMSNorm(d_state)
        self.C_norm = GatedRMSNorm(d_state)
        self.own("D", torch.ones, heads, kind="rate")
        self.norm = GatedRMSNorm(d_inner, groups=heads) if is_outproj_norm else None
        self.out_proj = nn.Linear(d_inner, d_model, bias=False)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`).

        Of the angles, which all heads share, and of a single group's B and C each rank computes a part for all.
        """
        heads, n, p = self.dims
        to.count(n_heads=heads, angles=self.angles)
        sections = grouped(self, to)
        to.set(dims=(to.share(heads), n, p), widths=[to.share(width) for width in self.widths])
        z, _, *rest = self.widths
        to.rows(self.in_proj, *([z] if z else []), *sections, *rest)
        to.own(self, "B_bias", "C_bias", "D", "dt_bias", *(name for name in self.starts if "mimo" in name))
        to.norm(self.norm, heads)
        to.summed(self.out_proj)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        z, u, *rest = self.first_map(x, self.in_proj).split(self.widths, dim=-1)
        return u, (z, *rest)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        _, dt, a, lam, angle = side
        x, b, c = split_heads(u, self.split)
        b, c = whole_group(self, b, c)
        if self.shares is not None:
            (angle,) = self.shares.gather(angle)
        angle = nn.functional.pad(angle, (0, self.dims[1] // 2 - self.angles)).unsqueeze(2)  # the other pairs stay
        if self.is_mimo:
            b, c = self._rows(self.B_norm(b), self.B_bias), self._rows(self.C_norm(c), self.C_bias)
            return {
                "x": self._each(x, self.mimo_x), "g": self._weights(side[0], x), "dt": dt, "a": a, "lam": lam,
                "angle": angle, "b": b, "c": c, "D": self.D, "dt_bias": self.dt_bias,
            }  # fmt: skip
        return {
            "x": x, "dt": dt, "a": a, "lam": lam, "angle": angle, "b": self.B_norm(b), "c": self.C_norm(c),
            "D": self.D, "dt_bias": self.dt_bias, "b_bias": self.B_bias.squeeze(1), "c_bias": self.C_bias.squeeze(1),
        }  # fmt: skip

    def _each(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [B, T, H, P] times weight [H, rank, P] -> [B, T, rank, H, P]."""
        return (x.unsqueeze(2) * weight.transpose(0, 1)).to(x.dtype)

    def _weights(self, z: Tensor, x: Tensor) -> Tensor:
        """The weights of the outputs, with the gate in them: [B, T, rank, H, P]."""
        weight = self.mimo_o.transpose(0, 1)
        if not z.shape[-1]:
            return weight.to(x.dtype).expand(*x.shape[:2], -1, -1, -1)
        return (nn.functional.silu(self._each(z.unflatten(-1, x.shape[2:]), self.mimo_z)) * weight).to(x.dtype)

    def _rows(self, x: Tensor, bias: Tensor) -> Tensor:
        """Keys or queries [B, T, rank · groups, N] with their biases [H, rank, N] -> [B, T, rank, H, N], where the two
        entries that turn together are neighbours."""
        heads, n, _ = self.dims
        each = x.unflatten(2, (self.rank, -1))
        each = each.repeat_interleave(heads // each.shape[3], 3) + bias.transpose(0, 1)
        return each.unflatten(-1, (2, n // 2)).transpose(-1, -2).flatten(-2).to(x.dtype)

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y, z = y.flatten(2), side[0] if side[0].shape[-1] and not self.is_mimo else None
        if self.norm is not None:
            y = self.norm(y, z)
        elif z is not None:
            y = gated(y, z)
        return product_of(y, self.out_proj)
