"""Calls that do not fit over ranks: an error on every rank before any of them sends a state, in a world of two."""

import pytest
import ranks_refused
import torch
from ranks import spawned

from dsf.parallel import Simulated, shares
from dsf.parallel.collectives import Gather
from dsf.parallel.tokens import gather_tokens

WORDS = {
    "mesh without the dimension": "tp",
    "mesh of three dimensions": "a mesh of one dimension, or of two (nodes, ranks of a node), got 3",
    "a group without this rank": "this rank is not in the group",
    "batch": "ranks differ: rank 0 has q float64 [1, T, 2, 3], rank 1 has q float64 [2, T, 2, 3]",
    "batch, relay": "ranks differ: rank 0 has q float64 [1, T, 2, 3], rank 1 has q float64 [2, T, 2, 3]",
    "heads": "rank 0 has q float64 [2, T, 2, 3], rank 1 has q float64 [2, T, 1, 3]",
    "dtype": "rank 0 has q bfloat16 [2, T, 2, 3], rank 1 has q float32 [2, T, 2, 3]",
    "batch of softmax": "softmax: ranks differ: rank 0 has q float64 [1, T",
    "state on the first": "rank 0 has initial_state given, rank 1 has initial_state not given",
    "state on the last": "rank 0 has initial_state not given, rank 1 has initial_state given",
    "state with a turn": "rank 0 has initial_state not given, rank 1 has initial_state given",
    "cache on the last": "rank 0 has initial_state not given, rank 1 has initial_state given",
    "state of another shape": "initial_state has shape [3, 2, 3, 2]",
    "headtail, odd": "two runs of one length, got 5 tokens",
    "headtail, odd on one": "two runs of one length, got 5 tokens",
    "headtail, lengths": "rank 0 has T = 6, rank 1 has T = 4; layout='headtail' needs runs of one length on all ranks",
    "headtail, lengths of a layer": "RetNet: ranks differ: rank 0 has T = 6, rank 1 has T = 4",
    "headtail, whole": "6 tokens do not divide",
    "shard, lengths": "shard cuts dimension 1, the tokens, as many in every tensor; got shapes [1, 6, 3], [1, 5]",
    "shard, one dimension": "shard cuts dimension 1, the tokens, as many in every tensor; got shapes [6]",
    "positions, half a token": "positions: tokens is 2.5, expected the number of the whole sequence's tokens",
    "softmax, lengths": "rank 0 has T = 3, rank 1 has T = 4; say so by Sequence(..., sizes=...)",
    "sizes": "rank 1 of 2 has 4 tokens, but sizes=(3, 3) of the Sequence give it 3 of 6",
    "whole by sizes": "these are all of them: give this rank's alone, cp.shard(x)",
    "whole by cu_seqlens": "these are all of them: give this rank's alone, cp.shard(x)",
    "whole layer by cu_seqlens": "these are all of them: give this rank's alone, cp.shard(x)",
    "whole, checked": "every rank holds the same 6 tokens",
    "cu_seqlens of one rank": "these are all of them",
    "cu_seqlens": "rank 0 has cu_seqlens of 2 sequences, 6 tokens, the longest 4 (crc",
    "how many cu_seqlens": "rank 1 has cu_seqlens of 3 sequences",
    "cu_seqlens on one": "rank 0 has packed False, rank 1 has packed True",
    "tokens of one, packed": "rank 1 of 2 has 4 tokens, but cu_seqlens of the global sequences gives it 3 of 6",
    "layout": "rank 1 has Sequence (layout='headtail'",
    "exchange": "exchange='relay'",
    "return_state": "rank 0 has return_state False, rank 1 has return_state True",
    "reverse": "rank 0 has reverse False, rank 1 has reverse True",
    "gradients": "rank 0 has gradients not wanted, rank 1 has gradients wanted",
    "an input on one": "missing input `k`",
    "a shape on one": "`a` has T = 5, but `q` has T = 6",
    "batch of a layer": "GatedDeltaNet: ranks differ: rank 0 has x float32 [1, T, 16], rank 1 has x float32 [2, T, 16]",
    "state of a layer": "GLA: ranks differ: rank 0 has state none",
    "mask on one": "attention_mask has 1 padded tokens",
    "mask in both directions": "attention_mask has 1 padded tokens",
    "positions of a model": "RotaryAttention: ranks differ: rank 0 has T = 4, rank 1 has T = 5",
    "labels of a model": "move whole labels on by one place",
    "steps of a model": "step: the mixers share the sequence over 2 ranks",
    "tokens of a model": "call dsf.parallel.attach(model, None) first: states are whole on every rank",
    "layer that needs all": "its filters reach over all tokens",
    "layer that looks ahead": "its convolution looks ahead",
    "model without mixers": "has no dsf mixer",
    "gather, lengths": "gather: ranks differ: rank 0 has T = 3, rank 1 has T = 4",
    "gather, whole": "rank 0 has tokens 6, rank 1 has tokens 7",
    "DTensors of batch": "no dimension of the mesh holds shards of tokens",
    "DTensors, whole": "no dimension of the mesh holds shards of tokens",
    "DTensors, headtail": "Shard(1) is one run of tokens a rank",
    "DTensors, other ranks": "tokens are sharded over the ranks [0, 1], which are not those of Sequence(rank 0 of 1",
    "DTensors, simulated": "takes a dsf.parallel.Sequence, got Simulated",
    "DTensors, lengths": "rank 0 has T = 4, rank 1 has T = 3; say so by Sequence(..., sizes=...)",
}
OF_TORCH = {"mesh without the dimension": "KeyError"}  # the mesh says so itself


@pytest.fixture(scope="module")
def two():
    return spawned(2, ranks_refused.two, 60.0)


@pytest.mark.parametrize("name", WORDS)
def test_every_rank_refuses(two, name):
    for found, *_ in two:
        assert found[name].startswith(OF_TORCH.get(name, "InputError") + ": ") and WORDS[name] in found[name]


def test_every_case_has_its_words(two):
    assert all(set(found) == set(WORDS) for found, *_ in two)


def test_calls_of_a_known_kind_are_not_compared_again(two):
    """One collective more for a kind of call, whatever lengths it has; one more for every call with check=True."""
    assert all(counts == [["gather"] * 2, ["gather"] * 5] for _, (counts, _), _ in two)


def test_the_same_tokens_on_every_rank_are_warned_of(two):
    """Once, not of tokens that do not differ from each other, and not where the kind of call is known."""
    for _, (_, texts), _ in two:
        (text,) = texts
        assert "every rank holds the same 6 tokens" in text and "cp.shard(x)" in text


def test_shards_of_dtensors_need_not_be_of_one_length(two):
    assert all(error <= 1e-12 for *_, errors in two for error in errors.values())


def test_a_call_of_another_kind_on_one_rank_is_never_silent():
    """Also after calls that were alike, when the other rank does not compare: sizes are made not to fit."""
    with pytest.raises(Exception, match=r"process 0|process 1|ranks differ"):
        spawned(2, ranks_refused.later, 40.0)


@pytest.mark.parametrize(
    ("work", "words"), [(ranks_refused.dies, "onnection"), (ranks_refused.sleeps, "imed out")], ids=["dies", "sleeps"]
)
def test_a_rank_that_does_not_come_ends_the_others_within_the_timeout(work, words):
    """Of a group with a timeout of 2 seconds, in the backward pass, by an error that the rank itself raises."""
    text, seconds = spawned(2, work, 30.0, alone=True)[0]
    assert text.startswith("RuntimeError") and words in text and seconds < 5


class Alone:
    """A group of one rank."""

    size, rank = 1, 0

    def answer(self, request):
        return request.x.unsqueeze(0) if isinstance(request, Gather) else request.x


def test_second_derivatives_do_not_pass_through_collectives():
    """Ranks that differentiate their own graphs twice would miss each other's part."""
    x = torch.randn(1, 3, 2, requires_grad=True)
    for through in (shares._Enter, shares._Leave, shares._Gather):
        y = through.apply(Alone(), x)
        y = y[0] if isinstance(y, tuple) else y
        torch.autograd.grad((y * y).sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"second derivatives .* layer on one rank has them"):
            torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (whole,) = gather_tokens(Simulated(1), [x], [3])
    with pytest.raises(RuntimeError, match=r"second derivatives .* layer on one rank has them"):
        torch.autograd.grad(whole.sum(), x, create_graph=True)
