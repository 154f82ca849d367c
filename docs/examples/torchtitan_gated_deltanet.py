"""torchtitan's Qwen3.5 with the Gated DeltaNet of this library: same model, same sharding, another kernel.

Needs torchtitan (its interfaces of release 0.3 and of mid-2026); `gated_delta` and its recurrence need dsf alone.

    spec = model_spec("debugmodel")   # a torchtitan ModelSpec, for a trainer's config_registry

What torchtitan's own kernel asks for and this one does not: boundaries on the CPU, key heads repeated for every value
head, a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

import dsf
from dsf import I, Key, N, Scalar, System, Value, exp, l2norm, outer


@dsf.recurrence
def gated_delta_rule(q: Key, k: Key, v: Value, g: Scalar, beta: Scalar) -> System:
    """Gated DeltaNet from what a projection gives: q and k of any length, g the logarithm of the decay.

    Source: Yang et al. (arXiv 2412.06464), equation 10.
    """
    k = l2norm(k)
    return System(A=exp(g) * (I - beta * outer(k, k)), B=k * (beta * v), C=l2norm(q) * N**-0.5)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **_: Any
) -> Tensor:
    """What torchtitan's GatedDeltaKernel computes.

    q, k: [T, Hk, N] or [B, T, Hk, N]; v: [..., H, P]; g, beta: [..., H]; Hk divides H. cu_seqlens: boundaries of
    sequences packed along T of one row, on the tensors' device. Returns y as v. Further arguments are left alone.
    """
    packed = q.dim() == 3
    inputs = [x.unsqueeze(0) if packed else x for x in (q, k, v, g, beta)]
    y: Tensor = gated_delta_rule(*inputs, cu_seqlens=cu_seqlens)
    return y.squeeze(0) if packed else y


def kernel_class() -> Any:
    """A GatedDeltaKernel of torchtitan whose forward is `gated_delta`. Raises ImportError without torchtitan."""
    from dataclasses import dataclass

    try:
        theirs = importlib.import_module("torchtitan.models.qwen3_5.gdn").GatedDeltaKernel
    except ImportError:  # release 0.3
        theirs = importlib.import_module("torchtitan.models.qwen3_5.model").GatedDeltaKernel

    class DsfGatedDeltaKernel(theirs):  # type: ignore[misc, valid-type]
        """Their module boundary, so that their sharding makes tensors local before it."""

        @dataclass(kw_only=True, slots=True)
        class Config(theirs.Config):  # type: ignore[misc]
            """Nothing beside theirs."""

        def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
            return gated_delta(*tensors, **options)

    return DsfGatedDeltaKernel


def with_our_kernel(config: Any) -> int:
    """Put our kernel's configuration in the place of theirs, everywhere in a model's; returns how many there were."""
    import dataclasses

    ours = kernel_class()
    theirs = ours.__mro__[1].Config
    found = [(old, parent, name) for _, old, parent, name in config.traverse(theirs) if parent is not None]
    for old, parent, name in found:
        values = {f.name: getattr(old, f.name) for f in dataclasses.fields(old) if f.init}
        setattr(parent, name, ours.Config(**values))
    return len(found)


def model_spec(flavor: str, **options: Any) -> Any:
    """torchtitan's ModelSpec of Qwen3.5 with our kernel. options: of its model_registry. Raises ImportError."""
    spec = importlib.import_module("torchtitan.models.qwen3_5").model_registry(flavor, **options)
    if not with_our_kernel(spec.model):
        raise RuntimeError(f"torchtitan's Qwen3.5 {flavor!r} has no Gated DeltaNet layer")
    return spec


if __name__ == "__main__":
    torch.manual_seed(0)
    q, k = torch.randn(2, 30, 2, 16)
    v, g, beta = torch.randn(30, 4, 32), -torch.rand(30, 4), torch.rand(30, 4)
    print(gated_delta(q, k, v, g, beta, torch.tensor([0, 12, 30])).shape)
