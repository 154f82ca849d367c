"""Mamba-3: a trapezoid in time, transitions that turn, decays that tokens choose."""

import inspect
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
    silu,
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
# what each write and read of the layer has of its own
_EACH: dict[str, Any] = {
    "b_bias": Param[Key],
    "c_bias": Param[Key],
    "mx": Param[Value],
    "mz": Param[Value],
    "mo": Param[Value],
}


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


def _several(x: Any, b: Any, c: Any, g: Any, delta: Expr, a: Expr, share: Expr, angle: Expr, D: Expr) -> System:
    """The trapezoid of several writes b_r x_r and reads c_r, which are weighted by g_r and added."""
    a_t, pairs = _transition(delta, a, angle), list(zip(b, x, strict=True))
    before = [System(A=I, B=prev(k * v) * ((1 - share) * delta)) for k, v in pairs]
    *now, last = [System(A=I if r else a_t, B=k * (share * delta * v)) for r, (k, v) in enumerate(pairs)]
    read, through = (sum(map(mul, part, g)) for part in (c, x))
    return compose(*before, *now, System(A=last.A, B=last.B, C=read, D=D * through))


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
        return _several(x, b, c, g, softplus(dt + dt_bias), a, sigmoid(lam), -angle, D)

    return mimo


mamba3_mimo = mamba3_mimo_of(RANK)


@lru_cache
def mamba3_mimo_weighed_of(rank: int, gated: bool) -> Recurrence:
    """Mamba-3 (MIMO) as its layer runs it. Params weigh a token's one x and one z for each of the writes and reads.
    Heads may share keys and queries, which have a bias for each head. gated: whether there is a z."""

    def mimo(**given: Any) -> System:
        """Mamba-3 (MIMO) with the weights of its layer, which multiply x, z and the outputs by channel.

        Source and symbols: as in mamba3_mimo; mx, mz, mo weigh x, z and the outputs of each write and read.
        """
        each = {name: [given[f"{name}{r}"] for r in range(rank)] for name in _EACH if f"{name}0" in given}
        b, c = ([k + bias for k, bias in zip(given[k], each[f"{k}_bias"], strict=True)] for k in ("b", "c"))
        x = [given["x"] * weight for weight in each["mx"]]
        g = each["mo"]
        if gated:
            g = [silu(given["z"] * weight) * out for weight, out in zip(each["mz"], g, strict=True)]
        delta = softplus(given["dt"] + given["dt_bias"])
        return _several(x, b, c, g, delta, given["a"], sigmoid(given["lam"]), -given["angle"], given["D"])

    kinds: dict[str, Any] = {"x": Value} | ({"z": Value} if gated else {}) | dict.fromkeys(("dt", "a", "lam"), Scalar)
    kinds |= {"angle": Pair, "b": Steps[Key, rank], "c": Steps[Key, rank], "D": Param[Scalar], "dt_bias": Param[Scalar]}
    kinds |= {f"{name}{r}": kind for name, kind in _EACH.items() for r in range(rank) if gated or name != "mz"}
    made = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in kinds.items()]
    mimo.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    return dsf.recurrence(name=f"mamba3_mimo{rank}_weighed{'' if gated else '_bare'}")(mimo)


def _beside(x: Tensor) -> Tensor:
    """x [..., N] with entries i and i + N / 2, which turn together, as neighbours."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class Mamba3(Mixer):
    """The Mamba-3 block. Parameter names, shapes and init as mamba_ssm's `Mamba3`.

    in_proj gives z, x, B, C and the pre-activations of Delta, A, lambda and of the angles, which all heads share. B and
    C go through an RMSNorm and get a bias for each head, which begins at 1. There is no short convolution: the
    trapezoid and the biases take its place. After the recurrence come the gate silu(z) and out_proj.

    rope_fraction: the part of the key entries that turn, 0.5 or 1.
    is_outproj_norm: an RMSNorm of each head before the gate; not with is_mimo. bare: no z.
    is_mimo: mimo_rank writes and reads a token (MIMO), from as many B and C of each group. mimo_x, mimo_z and mimo_o
      [heads, mimo_rank, headdim] weigh x, z and the outputs by channel. Key entry i then turns with entry
      i + d_state / 2, else with its neighbour, both as in mamba_ssm's kernels.
    Raises InputError for sizes that do not divide, an odd d_state, another rope_fraction, and is_outproj_norm with
    is_mimo.
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
            self.recurrence = mamba3_mimo_weighed_of(mimo_rank, not bare)
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
        heads = to.over_heads(angles=self.angles)
        sections = grouped(self, to)
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
            z = side[0]
            weights = {"b_bias": _beside(self.B_bias), "c_bias": _beside(self.C_bias), "mx": self.mimo_x}
            weights |= {"mo": self.mimo_o} | ({"mz": self.mimo_z} if z.shape[-1] else {})
            each = {f"{name}{r}": x for name, y in weights.items() for r, x in enumerate(y.unbind(1))}
            b, c = (_beside(y).unflatten(2, (self.rank, -1)) for y in (self.B_norm(b), self.C_norm(c)))
            return {
                "x": x, **({"z": z.unflatten(-1, x.shape[2:])} if z.shape[-1] else {}), "dt": dt, "a": a, "lam": lam,
                "angle": angle, "b": b, "c": c, "D": self.D, "dt_bias": self.dt_bias, **each,
            }  # fmt: skip
        return {
            "x": x, "dt": dt, "a": a, "lam": lam, "angle": angle, "b": self.B_norm(b), "c": self.C_norm(c),
            "D": self.D, "dt_bias": self.dt_bias, "b_bias": self.B_bias.squeeze(1), "c_bias": self.C_bias.squeeze(1),
        }  # fmt: skip

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y, z = y.flatten(2), side[0] if side[0].shape[-1] and not self.is_mimo else None
        if self.norm is not None:
            y = self.norm(y, z)
        elif z is not None:
            y = gated(y, z)
        return product_of(y, self.out_proj)
