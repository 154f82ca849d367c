"""The common block of time-invariant state space layers, and the papers' initialisations."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsf.language.errors import InputError
from dsf.mixers._module import Mixer, Side
from dsf.mixers._norm import gated
from dsf.mixers._own import normal

if TYPE_CHECKING:
    from dsf.parallel import Cuts


def hippo_legs(n: int) -> tuple[Tensor, Tensor]:
    """The HiPPO-LegS matrix A [N, N] and vector B [N], float64: S' = A S + B x keeps x's Legendre coefficients.

    A_nk = -√((2n+1)(2k+1)) below the diagonal, -(n+1) on it; B_n = √(2n+1). Source: Gu et al. (arXiv 2008.07669),
    Theorem 2, time-invariant as in S4 (arXiv 2111.00396), equation 2.
    """
    root = torch.sqrt(2 * torch.arange(n, dtype=torch.float64) + 1)
    lower = torch.outer(root, root).tril(-1)
    return -lower - torch.diag(torch.arange(1.0, n + 1, dtype=torch.float64)), root


def legs_in_pairs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """HiPPO-LegS in a real basis in which it is block-diagonal plus rank one: A = Λ - p pᵀ.

    n is even. Returns the frequencies ω [N/2] > 0 of Λ, whose blocks are [[-1/2, -ω], [ω, -1/2]], p [N] and B [N],
    float64. The change of basis is orthogonal: it keeps the norms of p, B and states. Source: S4 (arXiv 2111.00396),
    Theorem 1 and Appendix C.1. Raises InputError for an odd n.
    """
    if n % 2:
        raise InputError(f"legs_in_pairs: n is {n}, expected an even number: a real eigenvalue has no pair")
    a, b = hippo_legs(n)
    p = torch.sqrt(torch.arange(n, dtype=torch.float64) + 0.5)
    skew = a + torch.outer(p, p) + 0.5 * torch.eye(n, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(-1j * skew)  # skew v = i ω v
    chosen = math.sqrt(2) * vectors[:, n // 2 :]
    basis = torch.stack([chosen.imag, chosen.real], dim=-1).flatten(1)  # skew b = ω a, skew a = -ω b for v = a + i b
    return values[n // 2 :], basis.T @ p, basis.T @ b


def frequencies(channels: int, pairs: int, init: str) -> Tensor:
    """Imaginary parts of a channel's rates, equal in all channels.

    lin: π n; inv: N/π (N/(2n+1) - 1), of N = 2 `pairs`; both S4D (arXiv 2206.11893), equations 9 and 8. legs: those of
    HiPPO-LegS's normal part.
    """
    n, place = 2 * pairs, torch.arange(pairs, dtype=torch.float64)
    found = {
        "lin": lambda: math.pi * place,
        "inv": lambda: n / math.pi * (n / (2 * place + 1) - 1),
        "legs": lambda: legs_in_pairs(n)[0],
    }[init]()
    return found.to(torch.get_default_dtype()).repeat(channels, 1)


def log_steps(*shape: int, low: float, high: float) -> Tensor:
    """Logarithms of steps, uniform in [log low, log high]."""
    return torch.empty(shape).uniform_(math.log(low), math.log(high))


def halves(*shape: int) -> Tensor:
    """log 1/2 everywhere: the real part -1/2 of HiPPO-LegS's rates."""
    return torch.full(shape, math.log(0.5))


class StateSpace(Mixer):
    """The S4 block: a state space for each channel, GELU, and a linear map with a gated linear unit across channels.

    Every channel is a head of the recurrence. bare: without GELU and gated linear unit, with one linear map.
    """

    log_dt: Tensor
    A_log: Tensor
    A_imag: Tensor
    D: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        self.dims, self.bare = (d_model, d_state, 1), bare
        self.own("log_dt", partial(log_steps, low=dt_min, high=dt_max), d_model, kind="rate")
        self.own("D", partial(normal, std=1.0), d_model, kind="rate")
        self.output_linear = nn.Linear(d_model, d_model if bare else 2 * d_model)
        self.own_more(d_model, bare)
        self.place(device, dtype)

    def own_rates(self, init: str) -> None:
        """A_log and A_imag: N / 2 complex rates a channel, -exp(A_log) + i A_imag. Raises InputError for an odd N."""
        channels, n, _ = self.dims
        if n % 2:
            raise InputError(f"{type(self).__name__}: d_state {n} must be even, for a real and an imaginary part each")
        self.own("A_log", halves, channels, n // 2, kind="rate")
        self.own("A_imag", partial(frequencies, init=init), channels, n // 2, kind="rate")

    def cut(self, to: Cuts) -> None:
        """Declare a rank's part of this layer where ranks share its channels (`dsf.parallel.HeadShard`)."""
        to.over_channels()
        to.own(self, "log_dt", "D", "A_log", "A_imag", "B", "C", "W", "p")
        to.summed(self.output_linear)

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return x if self.shares is None else self.shares.own(x), ()

    def rate_inputs(self) -> dict[str, Tensor]:
        """The Params that all these recurrences have in common."""
        return {"dt": self.log_dt, "A_log": self.A_log, "A_imag": self.A_imag, "D": self.D.unsqueeze(-1)}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        y = y.flatten(2)
        return self.output_linear(y) if self.bare else glu(self.output_linear(F.gelu(y)))


def glu(x: Tensor) -> Tensor:
    """The gated linear unit: the first half of the channels times the sigmoid of the second."""
    value, gate = x.chunk(2, dim=-1)
    return gated(value, gate, "sigmoid")


def known(name: str, init: str, names: tuple[str, ...]) -> str:
    """Returns init. Raises InputError unless it is one of the names."""
    if init not in names:
        raise InputError(f"{name}: init is {init!r}; there are {', '.join(map(repr, names))}")
    return init


def paired(c: Tensor, factor: float = 1.0) -> Tensor:
    """Complex readouts c [..., N/2, 2] as real ones [..., N]: Re(c s) = (Re c, -Im c) · (Re s, Im s)."""
    signs = torch.linspace(factor, -factor, 2, dtype=c.dtype, device=c.device)  # made there: the host need not wait
    return (c * signs).flatten(-2)
