"""Steps of attention that write into their cache's memory: the definition's numbers, places that stay, no loss."""

import copy
from functools import partial

import pytest
import torch
from test_attention_bias import ALL, drawn, everything, forgetting, forgotten, sliding

import dsf
from dsf import InputError, KVCache, mixers
from dsf.call import decode

WIDE = mixers.attention_with(70, "learnt", True)  # a window that memory grows to
EVERY = [*ALL, forgotten, WIDE, mixers.softmax_attention, mixers.softmax_one]
each = pytest.mark.parametrize("recurrence", EVERY, ids=lambda r: r.name)
exact = partial(torch.testing.assert_close, rtol=0, atol=1e-11)


def part(recurrence, x, begin, end):
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {name: y[:, begin:end] if name in timed else y for name, y in x.items()}


def token(recurrence, x, t):
    timed = {i.name for i in recurrence.spec.inputs if i.kind.time}
    return {name: y[:, t] if name in timed else y for name, y in x.items()}


def parts(cache):
    return [y for y in cache[:5] if y is not None]


def places(cache):
    return [y.data_ptr() for y in parts(cache)]


def same_cache(found, expected):
    for name in KVCache._fields[:5]:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None and name == "angle":  # modulo whole turns
            exact(one.cos(), other.cos())
            exact(one.sin(), other.sin())
        elif one is not None:
            exact(one, other, msg=name)


@torch.no_grad()
@each
def test_steps_in_place_are_the_definition_and_leave_the_cache_of_a_call(recurrence):
    begin, end = (64, 81) if recurrence is WIDE else (3, 14)
    x = drawn(recurrence, end)
    expected, last = recurrence(**x, form="naive", return_state=True)
    state = recurrence(**part(recurrence, x, 0, begin), return_state=True)[1]
    for t in range(begin, end):
        y, state = recurrence.step(state, **token(recurrence, x, t), in_place=True)
        exact(y, expected[:, t])
    same_cache(decode.in_order(recurrence.spec, state), last)
    more = drawn(recurrence, 5)
    more |= {i.name: x[i.name] for i in recurrence.spec.inputs if not i.kind.time}
    y, after = recurrence(**more, initial_state=state, return_state=True)  # a call goes on from fixed memory
    truth, final = recurrence(**more, initial_state=last, form="naive", return_state=True)
    exact(y, truth)
    same_cache(after, final)
    plain, after = recurrence.step(state, **token(recurrence, more, 0))
    exact(plain, truth[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("recurrence", [mixers.softmax_attention, everything], ids=lambda r: r.name)
def test_rows_of_unequal_lengths_are_written_each_at_its_end(recurrence):
    bounds = [0, 2, 2, 9]  # the second row has no tokens yet
    x, new = drawn(recurrence, 9, B=1), drawn(recurrence, 6, B=3)
    new |= {i.name: x[i.name] for i in recurrence.spec.inputs if not i.kind.time}
    state = recurrence(**x, cu_seqlens=torch.tensor(bounds), return_state=True)[1]
    whole = []
    for row in range(3):
        own = part(recurrence, x, bounds[row], bounds[row + 1])
        timed = [i.name for i in recurrence.spec.inputs if i.kind.time]
        own |= {n: torch.cat([own[n], new[n][row : row + 1]], 1) for n in timed}
        whole.append(recurrence(**own, form="naive")[0, -6:])
    for t in range(6):
        y, state = recurrence.step(state, **token(recurrence, new, t), in_place=True)
        for row in range(3):
            exact(y[row], whole[row][t])
        if t == 2:  # beams: rows are taken in another order, twice, and dropped
            state = state.rows(torch.tensor([2, 0, 1]))
            new = {n: y[[2, 0, 1]] if y.shape[0] == 3 else y for n, y in new.items()}
            whole = [whole[row] for row in (2, 0, 1)]


@torch.no_grad()
def test_memory_stays_until_it_is_full_and_then_doubles():
    r = mixers.softmax_attention
    x = drawn(r, 140)
    expected = r(**x)
    state = r(**part(r, x, 0, 40), return_state=True)[1]
    kept = [y.clone() for y in parts(state)]
    first, sizes, memory = state, [], set()
    for t in range(40, 140):
        y, state = r.step(state, **token(r, x, t), in_place=True)
        exact(y, expected[:, t])
        sizes.append(state.k.shape[2])
        memory.add(tuple(places(state)))
    assert sizes == [128] * 88 + [256] * 12 and len(memory) == 2
    assert all(torch.equal(a, b) for a, b in zip(kept, parts(first), strict=True))  # a prompt's cache is not written to
    kept = decode.reserved(r.spec, state, 256)
    assert kept is state and decode.reserved(r.spec, state, 257).k.shape[2] == 320


@torch.no_grad()
def test_an_older_object_of_the_same_memory_is_the_newer_one():
    r = mixers.softmax_attention
    x = drawn(r, 80)
    expected = r(**x)
    state = decode.reserved(r.spec, r(**part(r, x, 0, 10), return_state=True)[1], 80)
    for t in range(10, 80):  # never the state that a step returns
        y, _ = r.step(state, **token(r, x, t), in_place=True)
        exact(y, expected[:, t])


@torch.no_grad()
def test_a_write_behind_the_memory_is_an_error_not_a_loss():
    r = mixers.softmax_attention
    x = drawn(r, 65)
    state = decode.reserved(r.spec, r(**part(r, x, 0, 64), return_state=True)[1], 64)
    state.filled.most = 3  # as if replays of a graph had written what the host did not count
    with pytest.raises(RuntimeError, match="out of bounds"):
        r.step(state, **token(r, x, 64), in_place=True)
    assert state.lengths.tolist() == [64, 64]
    state.filled.most = 128
    y, state = r.step(state, **token(r, x, 64), in_place=True)  # more than there is: memory grows early
    exact(y, r(**x)[:, 64])


@torch.no_grad()
def test_padding_of_a_cache_is_never_read():
    r = mixers.softmax_attention
    x, new = drawn(r, 5), drawn(r, 2)
    k, v = (x[n].transpose(1, 2).contiguous() for n in "kv")
    k[0, :, 3:], v[0, :, 3:] = torch.nan, torch.nan
    state = KVCache(k, v, torch.tensor([3, 5]))
    for t in range(2):
        y, state = r.step(state, **token(r, new, t), in_place=True)
        for row, held in enumerate((3, 5)):
            both = {n: torch.cat([x[n][row : row + 1, :held], new[n][row : row + 1, : t + 1]], 1) for n in x}
            exact(y[row], r(**both, form="naive")[0, -1])


def test_a_law_finds_steps_in_place_that_are_wrong(monkeypatch):
    laws = {"laws": ("step",), "examples": 2, "dtypes": ("float64",)}
    assert dsf.check(forgetting, **laws).ok
    right = decode.fixed_cache.write
    monkeypatch.setattr(decode.fixed_cache, "write", lambda cache, k, v, log, *rest: right(cache, k, v, 2 * log, *rest))
    assert not dsf.check(forgetting, **laws).ok


@torch.no_grad()
def test_copies_of_a_cache_go_on_each_for_itself():
    x = drawn(forgetting, 12)
    expected = forgetting(**x)
    state = forgetting(**part(forgetting, x, 0, 5), return_state=True)[1]
    _, state = forgetting.step(state, **token(forgetting, x, 5), in_place=True)
    saved = copy.deepcopy(state)
    for one in (state, saved):
        for t in range(6, 12):
            y, one = forgetting.step(one, **token(forgetting, x, t), in_place=True)
            exact(y, expected[:, t])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recurrence", [mixers.softmax_attention, forgetting, sliding], ids=lambda r: r.name)
def test_lower_types_are_kept_and_err_as_their_rounding_does(recurrence, dtype):
    x = {n: y.to(dtype) for n, y in drawn(recurrence, 20).items()}
    wide = recurrence(**{n: y.double() for n, y in x.items()}, form="naive")
    state = recurrence(**part(recurrence, x, 0, 4), return_state=True)[1]
    for t in range(4, 20):
        y, state = recurrence.step(state, **token(recurrence, x, t), in_place=True)
        assert y.dtype == state.k.dtype == dtype
        error = (y.double() - wide[:, t]).abs().amax((0, 2))
        assert (error < 2 * torch.finfo(dtype).eps * x["v"].abs().max()).all()  # y is a mean of values


def test_what_cannot_be_written_is_refused():
    r = mixers.softmax_attention
    x = drawn(r, 6)
    state = r(**part(r, x, 0, 5), return_state=True)[1]
    with pytest.raises(InputError, match="gradient would need"):
        r.step(state, **{n: y.requires_grad_() for n, y in token(r, x, 5).items()}, in_place=True)
    with torch.no_grad():
        new = token(r, x, 5)
        with pytest.raises(InputError, match="must be a KVCache"):
            r.step(state.k, **new, in_place=True)
        with pytest.raises(InputError, match="k of the KV cache is"):
            r.step(state.rows(torch.tensor([0])), **new, in_place=True)
        fixed = r.step(state, **new, in_place=True)[1]
        with pytest.raises(InputError, match="the KV cache has no bias"):
            r.step(fixed._replace(bias=None), **new, in_place=True)


@torch.no_grad()
@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)])
def test_inference_mode_may_begin_or_end_between_steps(modes):
    r = mixers.softmax_attention
    x = drawn(r, 8)
    expected = r(**x)
    with torch.inference_mode(modes[0]):
        state = r(**part(r, x, 0, 5), return_state=True)[1]
        state = r.step(state, **token(r, x, 5), in_place=True)[1]
    with torch.inference_mode(modes[1]):
        for t in (6, 7):
            y, state = r.step(state, **token(r, x, t), in_place=True)
            exact(y, expected[:, t])


@torch.no_grad()
@pytest.mark.parametrize("recurrence", [everything, forgetting], ids=lambda r: r.name)
def test_autocast_outside_changes_nothing_in_steps_in_place(recurrence):
    x, found = drawn(recurrence, 8, dtype=torch.float32), []
    for on in (False, True):
        state = recurrence(**part(recurrence, x, 0, 5), return_state=True)[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            for t in range(5, 8):
                y, state = recurrence.step(state, **token(recurrence, x, t), in_place=True)
        found.append(y)
    assert torch.equal(*found)


@torch.no_grad()
def test_watched_steps_find_the_first_bad_number():
    x = drawn(forgetting, 8)
    state = forgetting(**part(forgetting, x, 0, 5), return_state=True)[1]
    with dsf.validate():
        for t in (5, 6):
            _, state = forgetting.step(state, **token(forgetting, x, t), in_place=True)
        state.v[0, 0, 2] = float("nan")
        with pytest.raises(dsf.DsfError, match="v of "):
            forgetting.step(state, **token(forgetting, x, 7), in_place=True)
