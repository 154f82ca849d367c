"""What type checkers know of a user's calls. tests/test_packaging.py asks mypy, and pyright where there is one."""

# pyright: basic, reportUnnecessaryTypeIgnoreComment=error

from typing import Any

import torch
from torch import Tensor
from typing_extensions import assert_type

import dsf
from dsf import I, Key, Scalar, System, Value, mixers, models, outer, parallel
from dsf.mixers import MixerState
from dsf.models import CausalOutput
from dsf.models.hf import DsfForCausalLM
from dsf.parallel import HeadShard


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
    assert_type(f(q, q, q, q[..., 0], return_state=True), tuple[Tensor, Tensor | Any])
    assert_type(f(q, q, q, q[..., 0], return_state=wanted), Tensor | tuple[Tensor, Tensor | Any])
y, state = mine(q, q, q, q[..., 0], return_state=True)
mine(q, q, q, q[..., 0], initial_state=state)
print(state.shape)
assert_type(mine.step(state, q[:, 0], q[:, 0], q[:, 0], q[:, 0, :, 0]), tuple[Tensor, Tensor | Any])

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
assert_type(HeadShard(), HeadShard)
assert_type(parallel.SequenceShard(), parallel.SequenceShard)
print(dsf.analysis.convert.register, DsfForCausalLM.from_pretrained)

mine(q, q, q, q[..., 0], return_state="yes")  # type: ignore[call-overload]
mine(q, q, q, 3)  # type: ignore[call-overload]
layer(ids.tolist())  # type: ignore[call-overload]
both(q[:, 0], 3)  # type: ignore[arg-type]
model(ids.tolist())  # type: ignore[arg-type]
print(dsf.reccurrence)  # type: ignore[attr-defined]
print(models.CausalML)  # type: ignore[attr-defined]
print(parallel.HeadSard)  # type: ignore[attr-defined]
print(dsf.check(mine).okay)  # type: ignore[attr-defined]
