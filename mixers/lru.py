"""LRU, the linear recurrent unit: complex decays on a ring, dense maps in and out."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsf
from dsf import Key, Param, Scalar, System, Value, exp, sigmoid, turn
from dsf.call.tokenwise import LARGEST
from dsf.language.expr import Expr
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._own import normal
from dsf.mixers._state_space import glu, paired

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def lru(
    u: Key, nu_log: Param[Scalar], theta_log: Param[Scalar], gamma_log: Param[Scalar], C: Param[Key, Value]
) -> System:
    """LRU: a complex number a head that decays and turns by the same factor at every token.

    Source: Orvieto et al. (arXiv 2303.06349), equation 6 and Section 3.4. Symbols: lambda =
    exp(-exp(nu_log) + i exp(theta_log)), gamma = exp(gamma_log); u is the real and the imaginary part of the
    paper's B u, N = 2; C reads both, P = 2.
    """
    return System(A=exp(-exp(nu_log)) * turn(exp(theta_log)), B=exp(gamma_log) * u, C=C)


RATES = "nu_log", "theta_log", "gamma_log", "log_step", "Lambda_re", "Lambda_im"  # of LRU and of S5


def _activated_by_torch(y: Tensor, u: Tensor, skip: Tensor) -> Tensor:
    return F.gelu(y + skip.to(y.dtype) * u, approximate="tanh")


@dsf.tokenwise(by_torch=_activated_by_torch)
def activated(y: Key, u: Key, skip: Param[Key]) -> Expr:
    """GELU of y + D u, by tanh: the default of JAX, in which these layers were published."""
    x = y + skip * u
    return x * sigmoid(2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))


class ComplexUnits(Mixer):
    """A layer around a complex diagonal system x with the input B u: Re(C x) + D u.

    Then come GELU (by tanh) and a linear map with a gated linear unit; bare leaves these out. Every complex number is a
    head, whose N = 2 key entries are its real and its imaginary part; both are read.
    """

    D: Tensor
    parts: Tensor

    def __init__(self, d_model: int, d_state: int, bare: bool, layer_idx: int | None):
        super().__init__(layer_idx)
        self.dims, self.bare = (d_state, 2, 2), bare
        self.own("D", partial(normal, std=1.0), d_model, kind="rate")
        self.own("parts", _both, d_state, 2, 2, kind="constant")
        self.out = None if bare else nn.Linear(d_model, 2 * d_model)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its complex numbers (`dsf.parallel.HeadShard`).

        D and the gated linear unit across channels, which follow them, are whole on every rank.
        """
        heads, n, p = self.dims
        to.count(**{"complex numbers": heads})
        to.set(dims=(to.share(heads), n, p))
        to.own(self, *RATES, "B", "parts")
        to.own(self, "C", axis=1)
        to.behind("out")

    def project(self, x: Tensor) -> tuple[Tensor, Side]:
        return x, ()

    def seen(self, u: Tensor, side: Side, inputs: dict[str, Tensor]) -> Side:
        return (u, self.D)

    def mix(self, y: Tensor, side: Side, c: Tensor, factor: float = 1.0) -> Tensor:
        """factor Re(C x) + D u, GELU and GLU. y: x's two parts [B, T, H, 2]; side: u and D; c: [d_model, H, 2]."""
        y, (u, skip) = F.linear(y.flatten(2), paired(c, factor)), side
        if self.shares is None and self.out is not None:
            width = y.shape[-1]
            heads = next(n for n in range(1, width + 1) if width % n == 0 and width // n <= LARGEST)
            given = (x.unflatten(-1, (heads, -1)) for x in (y, u, skip))
            return glu(self.out(activated(*given).flatten(2)))
        own = skip.to(y.dtype) * u
        y = y + own if self.shares is None else self.shares.leave(y + self.shares.once(own))
        return y if self.out is None else glu(self.out(F.gelu(y, approximate="tanh")))


def _both(heads: int, n: int, p: int) -> Tensor:
    """The readout of a complex number's parts into two channels."""
    return torch.eye(n, p).expand(heads, -1, -1)


class LRU(ComplexUnits):
    """The LRU block: d_state complex numbers; initial radii from r_min to r_max, phases up to max_phase (radians).

    Source: Orvieto et al. (arXiv 2303.06349), Sections 2 and 3.4 and Appendix A, also for the names nu_log, theta_log
    and gamma_log. At start B is normal of variance 1/(2 d_model), C of variance 1/d_state, D normal. bare: neither
    GELU nor gated linear unit.
    """

    recurrence = lru
    nu_log: Tensor
    theta_log: Tensor
    gamma_log: Tensor
    B: Tensor
    C: Tensor

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: float = 2 * math.pi,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(d_model, d_state, bare, layer_idx)
        self.own("nu_log", partial(_ring, r_min=r_min, r_max=r_max), d_state, kind="rate")
        self.own("theta_log", partial(_phases, largest=max_phase), d_state, kind="rate")
        self.own("gamma_log", self._gamma, d_state, kind="rate")
        self.own("B", partial(normal, std=(2 * d_model) ** -0.5), d_state, 2, d_model)
        self.own("C", partial(normal, std=d_state**-0.5), d_model, d_state, 2)
        self.place(device, dtype)

    def _gamma(self, *shape: int) -> Tensor:
        """log √(1 - |lambda|²): inputs of variance one give states of variance one."""
        nu = getattr(self.nu_log, "full_tensor", lambda: self.nu_log)()  # of a DTensor, the whole
        return 0.5 * torch.log(-torch.expm1(-2 * torch.exp(nu.detach())))

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        driven = F.linear(u, self.B.flatten(0, 1)).unflatten(-1, (-1, 2))
        rates = {"nu_log": self.nu_log, "theta_log": self.theta_log, "gamma_log": self.gamma_log}
        return {"u": driven, "C": self.parts, **rates}

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return self.mix(y, side, self.C)


def _ring(*shape: int, r_min: float, r_max: float) -> Tensor:
    """nu_log with exp(-exp(nu_log)) uniform in area between two radii."""
    area = torch.rand(shape) * (r_max**2 - r_min**2) + r_min**2
    return torch.log(-0.5 * torch.log(area))


def _phases(*shape: int, largest: float) -> Tensor:
    """Logarithms of phases uniform up to the largest."""
    return torch.log(largest * torch.rand(shape).clamp(min=1e-6))
