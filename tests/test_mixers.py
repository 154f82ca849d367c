"""Laws of every mixer module; the modules come from the zoo's list."""

import inspect
import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from dsf import mixers

# Fewer key heads than value heads wherever a constructor has the choice.
SMALL = {
    "d_model": 8,
    "n_heads": 2,
    "n_kv_heads": 1,
    "n_key_heads": 1,
    "n_groups": 2,
    "d_state": 3,
    "headdim": 4,
    "d_conv": 3,
}
LAYERS = pytest.mark.parametrize("entry", [e for e in mixers.ZOO if e.module], ids=lambda e: e.name)
LENGTHS = (3, 1, 5)


def small(entry, dtype=torch.float64, **options):
    torch.manual_seed(0)
    bases = inspect.unwrap(entry.module).__mro__
    accepted = {name for base in bases for name in inspect.signature(base.__init__).parameters}
    sizes = SMALL | {"d_state": entry.recurrence.spec.keys_of(SMALL["d_state"])}
    module = entry.module(**{k: v for k, v in sizes.items() if k in accepted}, **options)
    with torch.no_grad():  # move biases, norms and skips off the values at which mistakes do not show
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.to(dtype)


def tokens(batch, length, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, SMALL["d_model"], generator=generator, dtype=torch.float64).to(dtype)


def numbers(state):
    """The floating tensors of a state (a KV cache also counts its tokens)."""
    return [x for x in tree_leaves(state) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def assert_same_state(got, expected):
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        assert_same(a, b)


@LAYERS
@pytest.mark.parametrize("length, cut", [(2, 1), (9, 4), (11, 10)])
@pytest.mark.parametrize("bare", [False, True])
def test_whole_equals_pieces(entry, length, cut, bare):
    module, x = small(entry, bare=bare), tokens(2, length)
    whole, last = module(x)
    first, middle = module(x[:, :cut])
    second, end = module(x[:, cut:], middle)
    assert_same(torch.cat([first, second], 1), whole)
    assert_same_state(end, last)


@LAYERS
@pytest.mark.parametrize("length", [1, 7])
def test_whole_equals_token_by_token(entry, length):
    module, x = small(entry), tokens(2, length)
    whole, last = module(x)
    state, outputs = None, []
    for t in range(length):
        y, state = module.step(x[:, t], state)
        outputs.append(y)
    assert_same(torch.stack(outputs, 1), whole)
    assert_same_state(state, last)


@LAYERS
def test_packed_equals_separate_twice_in_a_row(entry):
    module = small(entry)
    cuts = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    packed, alone = None, [None] * len(LENGTHS)
    for call in range(2):  # the second call starts from the packed state of the first
        x = tokens(1, sum(LENGTHS), seed=call)
        y, packed = module(x, packed, cu_seqlens=cuts)
        runs = [module(part, s) for part, s in zip(x.split(LENGTHS, 1), alone, strict=True)]
        assert_same(y, torch.cat([run[0] for run in runs], 1))
        alone = [run[1] for run in runs]
    step, _ = module.step(tokens(3, 1)[:, 0], packed)  # and decoding goes on from it
    assert_same(step, torch.cat([module.step(tokens(3, 1)[i : i + 1, 0], s)[0] for i, s in enumerate(alone)]))


def row_of(state, row):
    """One sequence's state."""
    conv = None if state.conv is None else state.conv[row : row + 1]
    own = state.recurrent
    own = own.rows(torch.tensor([row])) if isinstance(own, tuple) else own[row : row + 1]
    position = None if state.position is None else state.position[row : row + 1]
    return state._replace(conv=conv, recurrent=own, position=position)


@LAYERS
def test_empty_sequences_keep_their_states(entry):
    """First, last and several in a row: outputs and states are those of the other sequences, and theirs stay."""
    module = small(entry)
    plain, bounds = torch.tensor([0, 3, 8]), torch.tensor([0, 0, 3, 3, 3, 8, 8])
    x, filled = tokens(1, 8), [1, 4]
    alone, expected = module(x, cu_seqlens=plain)
    y, state = module(x, cu_seqlens=bounds)
    assert_same(y, alone)
    more = tokens(1, 8, seed=1)
    again, last = module(more, state, cu_seqlens=torch.tensor([0, 2, 5, 5, 5, 8, 8]))  # another is empty now
    first, _ = module(more[:, :2])
    assert_same(again[:, :2], first)
    assert_same(again[:, 2:5], module(more[:, 2:5], row_of(state, 1))[0])
    step, _ = module.step(tokens(6, 1)[:, 0], state)
    kept, _ = module.step(tokens(6, 1)[filled, 0], expected)
    assert_same(step[filled], kept)
    assert_same(step[0], module.step(tokens(6, 1)[:1, 0])[0][0])


@LAYERS
def test_future_tokens_change_nothing_before_them(entry):
    module, x = small(entry), tokens(1, 6)
    changed = torch.cat([x[:, :4], tokens(1, 2, seed=5)], 1)
    assert_same(module(changed)[0][:, :4], module(x)[0][:, :4])


@LAYERS
@pytest.mark.parametrize("bare", [False, True])
def test_gradients_reach_every_parameter_and_the_initial_state(entry, bare):
    module, x = small(entry, bare=bare), tokens(2, 6).requires_grad_()
    state = module(tokens(2, 3, seed=2))[1]
    state = tree_map_only(torch.Tensor, lambda s: s.detach().requires_grad_(s.is_floating_point()), state)
    y, last = module(x, state)
    loss = y.square().sum() + sum(s.square().sum() for s in numbers(last))
    wanted = {**dict(module.named_parameters()), "x": x}
    wanted |= {f"state {i}": s for i, s in enumerate(numbers(state)) if s.numel()}
    for (name, tensor), grad in zip(wanted.items(), torch.autograd.grad(loss, list(wanted.values())), strict=True):
        assert grad.isfinite().all(), name
        assert grad.shape == tensor.shape and grad.abs().max() > 0, name


@LAYERS
@pytest.mark.parametrize("bare", [False, True])
def test_state_size_counts_the_state(entry, bare):
    module, length = small(entry, bare=bare), 5
    state = module(tokens(1, length))[1]
    assert module.state_size(context=length) == sum(s.numel() for s in numbers(state))
    assert module.state_size(context=length, conv=False) == sum(s.numel() for s in numbers(state.recurrent))


@LAYERS
def test_bare_has_no_convolution_and_fewer_or_equal_parameters(entry):
    bare, full = small(entry, bare=True), small(entry)
    assert bare.conv1d is None and bare(tokens(1, 3))[1].conv is None
    names = dict(full.named_parameters())
    assert all(name in names and p.numel() <= names[name].numel() for name, p in bare.named_parameters())


@LAYERS
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_low_precision_stays_close(entry, dtype, tolerance):
    exact, module = small(entry), small(entry, dtype)
    exact.load_state_dict(module.state_dict())  # the rounded parameters
    x = tokens(2, 9, dtype=dtype)
    y, state = module(x)
    expected = exact(x.double())[0]
    assert y.dtype is dtype and y.isfinite().all()
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()
    again, _ = module.step(x[:, 0], state)
    assert again.dtype is dtype and again.isfinite().all()


@LAYERS
def test_inputs_are_what_the_recurrence_takes(entry):
    module, x = small(entry), tokens(2, 4)
    inputs = module.inputs(x)
    assert set(inputs) == {i.name for i in module.recurrence.spec.inputs}
    assert_same(module.recurrence(**inputs), module.recurrence(**module.inputs(x), form="naive"))


@LAYERS
def test_odd_convolutions_and_a_batch_of_one_token(entry):
    module = small(entry)
    assert module(tokens(3, 1))[0].shape == (3, 1, SMALL["d_model"])


def test_reset_tokens_begin_a_sequence():
    module, x = small(mixers.get("rg_lru"), bare=True), tokens(1, 7)
    reset = torch.zeros(1, 7)
    reset[0, 3] = 1
    y, _ = module(x, reset=reset)
    assert_same(y, torch.cat([module(x[:, :3])[0], module(x[:, 3:])[0]], 1))


def test_wrong_sizes_are_refused_by_name():
    with pytest.raises(ValueError, match="SSD: headdim"):
        mixers.SSD(8, headdim=5)
    with pytest.raises(ValueError, match="GatedDeltaNet: n_key_heads"):
        mixers.GatedDeltaNet(9, 3, n_key_heads=2)
    with pytest.raises(ValueError, match="RGLRU: n_heads"):
        mixers.RGLRU(8, 3)
    with pytest.raises(ValueError, match="eta is 'tanh'"):
        mixers.NormalizedAttention(8, eta="tanh")


def test_small_maps_side_by_side_are_the_maps_and_wrapped_ones_are_called():
    from dsf.mixers._beside import side_by_side

    first, second = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(4, 3, bias=False)
    x = torch.randn(2, 5, 4)
    for a, b in zip(side_by_side(x, first, second), (first(x), second(x)), strict=True):
        torch.testing.assert_close(a, b)
    second.register_forward_hook(lambda module, args, out: out + 1)
    for a, b in zip(side_by_side(x, first, second), (first(x), second(x)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("count", [7, 40])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("activation", [None, torch.nn.functional.silu])
def test_a_convolution_of_many_taps_is_the_same_as_a_long_one(count, started, activation, monkeypatch):
    """As on a GPU; also of fewer tokens than taps."""
    from dsf.mixers._conv import ShortConv

    conv = ShortConv(3, 20, bias=started, activation=activation).double()
    x = torch.randn(2, count, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, 19, dtype=torch.float64, requires_grad=True) if started else None
    leaves, found = [x, *conv.parameters(), *([state] if started else [])], []
    for by_long in (False, True):
        monkeypatch.setattr(ShortConv, "_is_long", lambda *_, now=by_long: now)
        y, last = conv(x, state)
        found.append([y, last, *torch.autograd.grad((y.sin().sum() + last.cos().sum()), leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_convolution_refuses_what_is_not_its_own_in_words():
    from dsf.language.errors import InputError

    conv = mixers.DeltaNet(8, 2).conv1d
    x = torch.randn(2, 5, 24)
    with pytest.raises(InputError, match=r"expected \[B, T, 24\]"):
        conv(x[..., 1:])
    with pytest.raises(InputError, match="as an earlier call of this module returned it"):
        conv(x, torch.zeros(2, 24, 2))
    with pytest.raises(InputError, match="of one row"):
        conv(x, cu_seqlens=torch.tensor([0, 5]))
