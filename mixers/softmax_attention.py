"""Softmax attention, the system with infinitely many states: whole, in a window, with a sink, with ALiBi's biases."""

import functools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import dsf
from dsf import I, Key, N, Param, Recurrence, Scalar, System, Value, exp, exp_features
from dsf.language.errors import InputError
from dsf.mixers._beside import product_of
from dsf.mixers._module import Mixer, Side, Span
from dsf.mixers._own import full

if TYPE_CHECKING:
    from dsf.parallel import Cuts


@dsf.recurrence
def softmax_attention(q: Key, k: Key, v: Value) -> System:
    """Softmax attention: never forget, read with the exponential kernel, divide by its sum.

    Source: Vaswani et al. (arXiv 1706.03762), equation 1; as a dynamical system, DSF (arXiv 2405.15731),
    Lemma 1.
    Symbols: <phi(q), phi(k)> = exp(q'k / sqrt N) with phi the monomials of degree p weighted by sqrt(1/p!),
    so the state [inf, P] has no finite form but the KV cache. k, v may have fewer heads (grouped queries,
    arXiv 2305.13245).
    Objective: Nadaraya-Watson regression, min over y of sum_j exp(q'k_j / sqrt N) |v_j - y|^2.
    """
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=dsf.ratio)


WINDOW = 128  # tokens of the zoo's sliding window, gpt-oss's
Sink = Literal["learnt", "one"]


@dsf.recurrence
def sliding_window_attention(q: Key, k: Key, v: Value) -> System:
    """Sliding-window attention: softmax attention of the last 128 tokens; `attention_with(W)` of other numbers.

    Source: Beltagy et al. (arXiv 2004.05150), Section 3.1; every second layer of gpt-oss (arXiv 2508.10925).
    Objective: Nadaraya-Watson regression on the window's tokens.
    """
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=dsf.ratio, window=WINDOW)


@dsf.recurrence
def alibi(q: Key, k: Key, v: Value, slope: Param[Scalar]) -> System:
    """ALiBi: softmax attention whose scores fall by a head's slope a token, which is a constant decay of its state.

    Source: Press et al. (arXiv 2108.12409), Section 3. Symbols: score i, j has the bias -slope (i - j).
    Objective: Nadaraya-Watson regression, min over y of sum_j exp(q'k_j / sqrt N - slope (i - j)) |v_j - y|^2.
    """
    return System(A=exp(-slope), B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=dsf.ratio)


@dsf.recurrence
def sink_attention(q: Key, k: Key, v: Value, s: Param[Scalar]) -> System:
    """Softmax attention with a learnt sink: one more score s a head, of a key that holds nothing.

    Source: gpt-oss (arXiv 2508.10925), Section 2; the tokens that it replaces, Xiao et al. (arXiv 2309.17453).
    Objective: Nadaraya-Watson regression with one more observation, 0 at weight exp(s).
    """
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * N**-0.5),
                  normalize=lambda num, den, one: num / (den + exp(s) * one))  # fmt: skip


@dsf.recurrence
def softmax_one(q: Key, k: Key, v: Value) -> System:
    """Softmax-one: one is added to softmax attention's sum, so that a head may read nothing.

    Source: Miller, "Attention is off by one" (2023); the "zero sink" of Xiao et al. (arXiv 2309.17453), Section 3.3.
    Objective: Nadaraya-Watson regression with one more observation, 0 at weight 1.
    """
    return System(A=I, B=exp_features(k) * v, C=exp_features(q * N**-0.5),
                  normalize=lambda num, den, one: num / (den + one))  # fmt: skip


@functools.cache
def attention_with(window: int | None = None, sink: Sink | None = None, biased: bool = False) -> Recurrence:
    """Softmax attention of the last `window` tokens (None: all), with a sink ("learnt" or "one") and ALiBi's biases.

    Inputs q, k, v, then `slope` where biased, then `s` of a learnt sink. Raises TraceError for a window below 1.
    """
    named = {
        (None, None, False): softmax_attention,
        (WINDOW, None, False): sliding_window_attention,
        (None, None, True): alibi,
        (None, "learnt", False): sink_attention,
        (None, "one", False): softmax_one,
    }
    if (window, sink, biased) in named:
        return named[window, sink, biased]

    def system(q: Any, k: Any, v: Any, slope: Any = None, s: Any = None) -> System:
        def with_sink(num: Any, den: Any, one: Any) -> Any:
            return num / (den + (one if s is None else exp(s) * one))

        a = I if slope is None else exp(-slope)
        rule: Any = dsf.ratio if sink is None else with_sink
        return System(A=a, B=exp_features(k) * v, C=exp_features(q * N**-0.5), normalize=rule, window=window)

    def plain(q: Key, k: Key, v: Value) -> System:
        return system(q, k, v)

    def sloping(q: Key, k: Key, v: Value, slope: Param[Scalar]) -> System:
        return system(q, k, v, slope)

    def sinking(q: Key, k: Key, v: Value, s: Param[Scalar]) -> System:
        return system(q, k, v, s=s)

    def both(q: Key, k: Key, v: Value, slope: Param[Scalar], s: Param[Scalar]) -> System:
        return system(q, k, v, slope, s)

    made: dict[tuple[bool, bool], Any] = {
        (False, False): plain,
        (True, False): sloping,
        (False, True): sinking,
        (True, True): both,
    }
    parts = ["alibi"] * biased + ([] if sink is None else [f"sink_{sink}"])
    name = "_".join([*parts, *([] if window is None else [f"window{window}"]), "attention"])
    return dsf.recurrence(name=name)(made[biased, sink == "learnt"])


class SoftmaxAttention(Mixer):
    """Causal multi-head softmax attention.

    headdim: width of a head of q, k and v; None: d_model / n_heads.
    n_kv_heads: heads of k and v, a divisor of n_heads (grouped queries); None: n_heads.
    window: the number of last tokens that are read; None: all.
    sink: a score for reading nothing: None, "learnt" (one of each head, 0 at start) or "one" (fixed at 0: softmax-one).
    alibi: ALiBi's biases, the layer's only positions, with the slopes of `alibi_slopes`. bias: of the projections.
    bare: changes nothing, as there is neither convolution nor gate. Projections keep torch's default init.
    """

    recurrence = softmax_attention
    beside = ("q_proj", "k_proj", "v_proj")
    slope: Tensor
    s: Tensor

    def __init__(
        self,
        d_model: int,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        headdim: int | None = None,
        window: int | None = None,
        sink: Sink | None = None,
        alibi: bool = False,
        bias: bool = False,
        bare: bool = False,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layer_idx)
        n_heads, headdim = self.heads(d_model, n_heads, ("n_kv_heads", n_kv_heads), headdim=(d_model, headdim))
        self.n_kv_heads = self.shared("n_kv_heads", n_kv_heads, n_heads)
        self.dims = (n_heads, headdim, headdim)
        if sink not in (None, "learnt", "one"):
            raise InputError(f"SoftmaxAttention: sink is None, 'learnt' or 'one', got {sink!r}")
        if window is not None and window < 1:
            raise InputError(f"SoftmaxAttention: window is {window}, expected at least 1 token")
        self.recurrence = attention_with(window, sink, alibi)
        if alibi:
            self.own("slope", alibi_slopes, n_heads, kind="constant")
        if sink == "learnt":
            self.own("s", partial(full, value=0.0), n_heads, kind="vector")
        self.q_proj = nn.Linear(d_model, n_heads * headdim, bias=bias)
        self.k_proj = nn.Linear(d_model, self.n_kv_heads * headdim, bias=bias)
        self.v_proj = nn.Linear(d_model, self.n_kv_heads * headdim, bias=bias)
        self.o_proj = nn.Linear(n_heads * headdim, d_model, bias=bias)
        self.place(device, dtype)

    def cut(self, to: "Cuts") -> None:
        """Declare a rank's part of this layer where ranks share its heads (`dsf.parallel.HeadShard`)."""
        to.over_heads(n_kv_heads=self.n_kv_heads)
        to.set(n_kv_heads=to.share(self.n_kv_heads))
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            to.rows(linear)
        to.own(self, *self.starts)
        to.summed(self.o_proj)

    def arguments(self, u: Tensor, side: Side, span: Span) -> dict[str, Tensor]:
        heads, n, p = self.dims
        q, given = self.made_first(u)
        k, v = self.made(given, "k_proj"), self.made(given, "v_proj")
        return {
            "q": q.unflatten(-1, (heads, n)),
            "k": k.unflatten(-1, (self.n_kv_heads, n)),
            "v": v.unflatten(-1, (self.n_kv_heads, p)),
            **{name: getattr(self, name) for name in self.starts},
        }

    def readout(self, y: Tensor, side: Side) -> Tensor:
        return product_of(y.flatten(2), self.o_proj)

    def state_size(self, context: int = 0, conv: bool = True) -> int:
        """The numbers in one sequence's KVCache after `context` tokens: k and v of those that are read, with ALiBi also
        a bias for each head."""
        (heads, n, p), window = self.dims, self.recurrence.spec.system.window
        kept = context if window is None else min(context, window)
        return kept * (self.n_kv_heads * (n + p) + ("slope" in self.starts) * heads)


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slopes [n] of n heads: 2^(-8 i / n) for i from 1 to n, if n is a power of two.

    For other n, as in the paper's code: those of the next smaller power of two, then every second one of twice that.
    """
    power = 2 ** int(math.log2(heads))
    own = 2.0 ** (-8.0 * torch.arange(1, power + 1) / power)
    return torch.cat([own, 2.0 ** (-4.0 * (1 + 2 * torch.arange(heads - power)) / power)])
