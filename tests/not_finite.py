"""A packed call in which one sequence is not finite, beside the same call in which all are."""

import torch

BOUNDS = (0, 3, 12, 13, 24)
BAD = 1  # the sequence
SPOILED = slice(5, 7)  # its tokens
KEPT = [t for t in range(BOUNDS[-1]) if not BOUNDS[BAD] <= t < BOUNDS[BAD + 1]]
ROWS = [0, 2, 3]


def others(recurrence, given, state, bad=None, **how):
    """What other sequences have: outputs, states, and gradients of their tokens and first states, by name.

    bad: None, or the value that two tokens of the sequence, and every gradient of its outputs and state, have instead.
    """
    timed = [i.name for i in recurrence.spec.inputs if i.kind.time]
    leaves = {name: x.clone() for name, x in given.items()}
    for name in timed if bad is not None else ():
        leaves[name][:, SPOILED] = bad
    wrt = {name: leaves[name].requires_grad_() for name in timed}
    start = None if state is None else state.clone().requires_grad_()
    y, final = recurrence(**leaves, initial_state=start, cu_seqlens=torch.tensor(BOUNDS), return_state=True, **how)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    found, ends, arriving = {"y": y.detach()[:, KEPT]}, [y], [weights]
    if torch.is_tensor(final):
        found["state"] = final.detach()[ROWS]
        if not recurrence.spec.is_stabilised:  # such a state is relative to a running maximum
            ends.append(final)
            arriving.append(torch.linspace(1, 2, final.numel(), dtype=final.dtype).reshape(final.shape))
    if bad is not None:
        weights[:, BOUNDS[BAD] : BOUNDS[BAD + 1]] = bad
        for x in arriving[1:]:
            x[BAD] = bad
    wrt |= {} if start is None else {"first state": start}
    slopes = torch.autograd.grad(ends, list(wrt.values()), arriving, allow_unused=True)
    for name, x in zip(wrt, slopes, strict=True):
        if x is not None:
            found[f"gradient of {name}"] = x[ROWS] if name == "first state" else x[:, KEPT]
    return found


def assert_alone(recurrence, given, state, bad, **how):
    """The sequence that is not finite changes nothing of the others, to the last bit.

    Angles are one sum over all tokens, from which a sequence subtracts what came before: other numbers before it change
    how that is rounded.
    """
    expected, found = others(recurrence, given, state, **how), others(recurrence, given, state, bad, **how)
    turns = recurrence.spec.frame is not None and recurrence.spec.frame.angles is not None
    turns = turns and how.get("form") != "naive"  # which sums each sequence alone
    for name, x in expected.items():
        least = 50 * len(recurrence.spec.system.micro_steps) * torch.finfo(x.dtype).eps if turns else 0.0
        assert torch.isfinite(x).all(), name
        torch.testing.assert_close(found[name], x, rtol=least, atol=least, msg=lambda m, name=name: f"{name}: {m}")


def first_states(recurrence, given, drawn):
    """States of as many sequences, from a call on `drawn` inputs; None where a state is a cache of tokens."""
    if recurrence.spec.is_attention or recurrence.spec.is_softmax:
        return None
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    before = {name: x if name in timed else given[name] for name, x in drawn.items()}
    return recurrence(**before, return_state=True)[1].detach()
