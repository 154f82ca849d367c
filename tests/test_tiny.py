"""Read this first: what the library does, in one page of small examples."""

import pytest
import torch

import dsf
from dsf import I, Key, Scalar, System, Value, outer, sigmoid


# A recurrence is written as its paper writes it: S_t = A_t S_{t-1} + B_t, y_t = C_tᵀ S_t.
@dsf.recurrence
def gated_delta(q: Key, k: Key, v: Value, a: Scalar, b: Scalar) -> System:
    """Decay the state, erase along k, write v."""
    alpha, beta = sigmoid(a), sigmoid(b)
    return System(A=alpha * (I - beta * outer(k, k)), B=k * (beta * v), C=q)


B, T, H, N, P = 2, 10, 2, 3, 4  # batch, tokens, heads, entries of a key, channels of a value


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    k = torch.nn.functional.normalize(torch.randn(B, T, H, N), dim=-1)
    return {
        "q": torch.randn(B, T, H, N), "k": k, "v": torch.randn(B, T, H, P), "a": torch.randn(B, T, H),
        "b": torch.randn(B, T, H),
    }  # fmt: skip


def by_hand(q, k, v, a, b):
    """The same recurrence as a loop over tokens."""
    state, out = torch.zeros(B, H, N, P), []
    for t in range(T):
        alpha, beta = a[:, t, :, None, None].sigmoid(), b[:, t, :, None, None].sigmoid()
        key, value = k[:, t, :, :, None], v[:, t, :, None, :]
        erased = state - beta * key * (key * state).sum(-2, keepdim=True)
        state = alpha * erased + beta * key * value
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, dim=1), state


def test_calling_a_recurrence_runs_it(inputs):
    y, state = gated_delta(**inputs, return_state=True)
    expected, last = by_hand(**inputs)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state, last)


def test_all_its_forms_agree(inputs):
    expected = gated_delta(**inputs, form="naive")
    assert gated_delta.forms == ("naive", "recurrent", "scan", "chunk", "kernel")
    for form in gated_delta.forms:
        torch.testing.assert_close(gated_delta(**inputs, form=form), expected)


def test_gradients_flow_through_every_form(inputs):
    for x in inputs.values():
        x.requires_grad_()
    expected = torch.autograd.grad(gated_delta(**inputs, form="naive").square().sum(), list(inputs.values()))
    found = torch.autograd.grad(gated_delta(**inputs).square().sum(), list(inputs.values()))
    torch.testing.assert_close(found, expected)


def test_it_decodes_one_token_at_a_time(inputs):
    expected, state = gated_delta(**inputs), None
    for t in range(T):
        y, state = gated_delta.step(state, **{name: x[:, t] for name, x in inputs.items()})
        torch.testing.assert_close(y, expected[:, t])


def test_it_says_what_it_is_and_what_was_chosen():
    assert gated_delta.spec.structure == "scalar decay + delta"
    assert "A = sigmoid(a) * (I - sigmoid(b) * outer(k, k))" in str(gated_delta)
    plan = gated_delta.plan(T=2048, N=64, P=64)
    assert plan.form == "chunk" and "triangular solve" in plan.reason


def test_it_is_a_linear_system_on_real_inputs(inputs):
    trajectory = gated_delta.trajectory(**inputs)
    eigenvalues = torch.linalg.eigvals(trajectory.dense()[:, :, :, 0]).abs()  # α (twice) and α (1 - β)
    largest = eigenvalues.amax(-1)
    torch.testing.assert_close(largest, inputs["a"].sigmoid(), rtol=1e-4, atol=1e-4)


def test_mistakes_are_named(inputs):
    with pytest.raises(dsf.InputError, match="gated_delta: `k` has N = 5, but `q` has N = 3"):
        gated_delta(**(inputs | {"k": torch.randn(B, T, H, 5)}))
