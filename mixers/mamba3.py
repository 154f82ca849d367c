"""Mamba-3: a trapezoid in time, transitions that turn, decays that tokens choose."""

import math
from functools import partial
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
from dsf.mixers._beside import product_of
from dsf.mixers._conv import split_heads
from dsf.mixers._mamba import grouped, whole_group
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._norm import GatedRMSNorm, gated
from dsf.mixers._own import time_step

if TYPE_CHECKING:
    from dsf.parallel import Cuts

A_FLOOR = 1e-4  # every head forgets


def _trapezoid(x: Expr, b: Expr, c: Expr, delta: Expr, a: Expr, share: Expr, angle: Expr, D: Expr) -> System:
    """A trapezoid over two tokens: delta is the step, share its rule."""
    a_t = exp(-(maximum(softplus(a), A_FLOOR) * delta)) * turn(delta * (math.pi * tanh(angle)))
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

    Source and symbols: as in mamba3.
    """
    return _trapezoid(x, b + b_bias, c + c_bias, softplus(dt + dt_bias), a, sigmoid(lam), angle, D)


def mamba3_mimo_of(rank: int) -> Recurrence:
    """Mamba-3 with writes of a rank: b and x have `rank` values a token, which share a step and a read."""

    @dsf.recurrence(name=f"mamba3_mimo{rank}")
    def mimo(
        x: Steps[Value, rank], dt: Scalar, a: Scalar, lam: Scalar, angle: Pair, b: Steps[Key, rank], c: Key,
        dt_bias: Param[Scalar],
    ) -> System:  # fmt: skip
        """Mamba-3 with several writes a token (MIMO), of one read.

        Source: Lahoti et al. (arXiv 2603.15569), the multi-input state update. Symbols: as in mamba3.
        """
        delta, share = softplus(dt + dt_bias), sigmoid(lam)
        a_t = exp(-(maximum(softplus(a), A_FLOOR) * delta)) * turn(delta * (math.pi * tanh(angle)))
        pairs = list(zip(b, x, strict=True))
        steps = [System(A=I, B=prev(k * v) * ((1 - share) * delta)) for k, v in pairs]
        steps += [System(A=I if r else a_t, B=k * (share * delta * v), C=None) for r, (k, v) in enumerate(pairs)]
        return compose(*steps[:-1], System(A=steps[-1].A, B=steps[-1].B, C=c))

    return mimo


class Mamba3(Mixer):
    """The Mamba-3 block (SISO). Parameter names, shapes and init as mamba_ssm's `Mamba3`.

    in_proj gives z, x, B, C and the pre-activations of Delta, A, lambda and the angles, which all heads share; B and C
    pass an RMSNorm and get a bias a head, which starts at 1. rope_fraction of the key entries turn, 0.5 or 1. There is
    no short convolution: the trapezoid and the biases take its place. Then gate silu(z) and out_proj; is_outproj_norm:
    an RMSNorm a head before that gate. bare: no z.
    """

    recurrence = mamba3_biased
    beside = ("in_proj",)
    D: Tensor
    dt_bias: Tensor
    B_bias: Tensor
    C_bias: Tensor

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
        self.dims = (heads, d_state, headdim)
        self.n_groups = n_groups
        self.angles = int(d_state * rope_fraction) // 2
        keys = n_groups * d_state
        self.widths = [0 if bare else d_inner, d_inner + 2 * keys, heads, heads, heads, self.angles]
        self.split = (heads, headdim, n_groups, d_state, n_groups, d_state)  # x, B, C
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        self.own("dt_bias", partial(time_step, dt_min=dt_min, dt_max=dt_max), heads, kind="rate")
        self.own("B_bias", torch.ones, heads, 1, d_state)
        self.own("C_bias", torch.ones, heads, 1, d_state)
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
        to.own(self, "B_bias", "C_bias", "D", "dt_bias")
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
        return {
            "x": x, "dt": dt, "a": a, "lam": lam, "angle": angle, "b": self.B_norm(b), "c": self.C_norm(c),
            "D": self.D, "dt_bias": self.dt_bias, "b_bias": self.B_bias.squeeze(1), "c_bias": self.C_bias.squeeze(1),
        }  # fmt: skip

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y, z = y.flatten(2), side[0] if side[0].shape[-1] else None
        if self.norm is not None:
            y = self.norm(y, z)
        elif z is not None:
            y = gated(y, z)
        return product_of(y, self.out_proj)
