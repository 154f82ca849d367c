"""What a type checker knows of a user's calls. tests/test_packaging.py asks one."""

import torch
from torch import Tensor
from typing_extensions import assert_type

import dsf
from dsf import I, Key, KVCache, Scalar, System, Value, mixers, models, outer
from dsf.mixers import MixerState
from dsf.models import CausalOutput


@dsf.recurrence
def mine(q: Key, k: Key, v: Value, a: Scalar) -> System:
    """A recurrence of a user's own."""
    return System(A=a * (I - outer(k, k)), B=k * v, C=q)


q = torch.zeros(1, 3, 1, 2)
ids = torch.zeros(1, 3, dtype=torch.long)
wanted = bool(ids.numel())

for f in (mine, mixers.gated_deltanet):
    assert_type(f(q, q, q, q[..., 0]), Tensor)
    assert_type(f(q, q, v=q, a=q[..., 0], form="scan"), Tensor)
    assert_type(f(q, q, q, q[..., 0], return_state=True), tuple[Tensor, Tensor | KVCache])
    assert_type(f(q, q, q, q[..., 0], return_state=wanted), Tensor | tuple[Tensor, Tensor | KVCache])
y, state = mine(q, q, q, q[..., 0], return_state=True)
mine(q, q, q, q[..., 0], initial_state=state)
assert_type(mine.step(state, q[:, 0], q[:, 0], q[:, 0], q[:, 0, :, 0]), tuple[Tensor, Tensor | KVCache])

layer, both, long = mixers.GatedDeltaNet(8, n_heads=1), mixers.VisionMamba(8), mixers.Hyena(8, l_max=4)
assert_type(layer(q[:, 0]), tuple[Tensor, MixerState])
assert_type(layer(q[:, 0], use_cache=False), tuple[Tensor, None])
assert_type(layer(q[:, 0], use_cache=wanted), tuple[Tensor, MixerState | None])
assert_type(layer(q[:, 0], layer(q[:, 0])[1])[0], Tensor)
assert_type(mixers.Layer(mine, 8, n_heads=1)(q[:, 0]), tuple[Tensor, MixerState])
assert_type(both(q[:, 0]), tuple[Tensor, None])
assert_type(long(q[:, 0]), tuple[Tensor, None])

model = dsf.models.CausalLM(models.ModelConfig(vocab_size=4))
assert_type(model(ids), CausalOutput)
model(ids, ids, return_state=False)

mine(q, q, q, q[..., 0], return_state="yes")  # type: ignore[call-overload]
mine(q, q, q, 3)  # type: ignore[call-overload]
layer(ids.tolist())  # type: ignore[call-overload]
both(q[:, 0], 3)  # type: ignore[arg-type]
model(ids.tolist())  # type: ignore[arg-type]
print(dsf.reccurrence)  # type: ignore[attr-defined]
print(models.CausalML)  # type: ignore[attr-defined]
print(dsf.check(mine).okay)  # type: ignore[attr-defined]
