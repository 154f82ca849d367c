"""Context parallelism on process groups: gloo worlds of two and of four ranks against the whole sequence."""

import pytest
import ranks_handed
import ranks_work
from ranks import spawned


@pytest.fixture(scope="module")
def two():
    return spawned(2, ranks_handed.two, 240.0)


@pytest.fixture(scope="module")
def four():
    return spawned(4, ranks_work.four, 120.0)


def test_two_ranks_equal_the_whole(two):
    errors = {name: max(found[name] for found, *_ in two) for name in two[0][0]}
    assert len(errors) > 20
    assert not {name: e for name, e in errors.items() if not e <= 1e-9}


def test_two_ranks_issue_the_same_collectives(two):
    (_, first, *_), (_, second, *_) = two
    assert first == second
    counts = {len(log) for log in first}
    assert len(counts) == 1  # with no tokens, with a loss of zero


def test_bad_input_is_refused_on_every_rank(two):
    (_, _, first, *_), (_, _, second, *_) = two
    assert "these are all of them: give this rank's alone, cp.shard(x)" in first[0]
    assert "two runs of one length, got 5 tokens" in first[1]
    assert all(isinstance(text, str) for text in (*first, *second))
    assert first[1:] == second[1:]
    assert "float32" in first[2] and "rank 1" in first[2]
    assert "move whole labels on by one place" in first[-1]


def test_placements_and_policies_that_do_not_fit_are_refused(two):
    (*_, first, _), (*_, second, _) = two
    assert first == second and all(isinstance(text, str) for text in first)
    tokens, mixed, plain, entries, cache, cast, none = first
    assert "`q` is sharded over tokens; give parallel=" in tokens
    assert "give parallel=" in mixed
    assert "`q` is no DTensor and others are" in plain
    assert "expected Replicate() or a Shard of one of batch (dim 0), heads (dim 2)" in entries
    assert "a cache of keys and values is not returned of DTensors" in cache
    assert "casts the rate" in cast and "torch.bfloat16" in cast and "has no dsf mixer" in none


def test_four_ranks_of_two_nodes_equal_the_whole(four):
    errors = {name: max(found[name] for found, _ in four) for name in four[0][0]}
    assert len(errors) > 15
    assert not {name: e for name, e in errors.items() if not e <= 1e-9}
    assert all(logs == four[0][1] for _, logs in four)


def test_a_compiled_and_checkpointed_layer_keeps_its_collectives(two):
    """Also where a rank has no use for what it hears (the first), or nothing to tell (the first, backward): forward the
    counts of tokens, the convolution's window, the recurrence's state and the last one; backward these again, and the
    gradients of the last, of the state and of the window."""
    (first, traced), (second, same) = (found[-1] for found in two)
    assert max(first, second) <= 1e-9 and traced == same
    assert [len(graph) for graph in traced] == [4, 7]
