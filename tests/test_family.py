"""Every recurrence of the zoo: its forms agree with the dense unrolled one, and it names its source."""

import mixer_inputs
import pytest
import torch

from dsf import mixers

FAMILY = pytest.mark.parametrize("entry", mixers.ZOO, ids=lambda e: e.name)


@FAMILY
@pytest.mark.parametrize("tokens, cut", [(1, 0), (9, 4)])
def test_every_form_agrees_with_the_naive_one_and_continues_any_state(entry, tokens, cut):
    r = entry.recurrence
    inputs = mixer_inputs.sample(r, tokens=tokens)
    naive = r(**inputs, form="naive")
    assert naive.isfinite().all()
    timed = {i.name for i in r.spec.inputs if i.kind.time}
    head, tail = (
        {k: v[:, part] if k in timed else v for k, v in inputs.items()} for part in (slice(cut), slice(cut, None))
    )
    for form in r.forms:
        y = r(**inputs, form=form)
        if cut:  # the oracle goes on from this form's state
            first, state = r(**head, form=form, return_state=True)
            second = r(**tail, form="naive", initial_state=state)
            torch.testing.assert_close(torch.cat([first, second], 1), naive, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(y, naive, rtol=1e-9, atol=1e-9, msg=lambda m, form=form: f"{form}: {m}")


@FAMILY
def test_gradients_of_the_chosen_form_are_those_of_the_naive_one(entry):
    r = entry.recurrence
    inputs = {k: v.requires_grad_() for k, v in mixer_inputs.sample(r, tokens=8).items() if k != "reset"}
    fixed = {k: v for k, v in mixer_inputs.sample(r, tokens=8).items() if k == "reset"}
    weight = torch.randn_like(r(**inputs, **fixed))
    naive, auto = (
        torch.autograd.grad((r(**inputs, **fixed, form=form) * weight).sum(), list(inputs.values()))
        for form in ("naive", "auto")
    )
    for name, expected, got in zip(inputs, naive, auto, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@FAMILY
def test_docstring_names_its_source(entry):
    assert entry.summary and "arXiv" in entry.source, entry.name


def test_names_are_unique_and_found():
    assert len({e.name for e in mixers.ZOO}) == len(mixers.ZOO)
    assert all(mixers.get(e.name) is e for e in mixers.ZOO)


def test_unknown_name_lists_near_ones():
    assert mixers.get("gated-delta-net").name == "gated_deltanet"
    with pytest.raises(KeyError, match=r"no mixer is called 'gated-deltanets'; near names: gated_deltanet"):
        mixers.get("gated-deltanets")
