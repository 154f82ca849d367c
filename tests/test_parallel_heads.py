"""Layers whose heads are shared by ranks (HeadShard), in worlds of two and four processes."""

import pytest
from ranks import spawned
from ranks_heads import LAYERS, ON_FOUR, four, two

from dsf import mixers


@pytest.fixture(scope="module")
def of_two():
    """What the ranks of a world of two found."""
    return spawned(2, two)


@pytest.mark.parametrize("name", LAYERS)
def test_two_ranks_compute_what_the_whole_layer_does(of_two, name):
    """Outputs, gradients, a step of AdamW, state dicts in both directions, decoding and packed sequences."""
    for found, *_ in of_two:
        assert not found[name], found[name]


def test_every_layer_of_the_zoo_is_tried():
    assert {e.name for e in mixers.ZOO if e.module is not None} <= set(LAYERS)


def test_what_ranks_cannot_share_is_refused_in_words(of_two):
    for _, refusals, *_ in of_two:
        heads, kv, groups, channels, blocks, nothing, one, again, own, falling, unplanned = refusals
        assert "GatedDeltaNet has n_heads=3, which 2 ranks cannot share evenly" in heads
        assert "n_kv_heads=1" in kv and "n_groups=3" in groups and "channels=5" in channels and "blocks=3" in blocks
        assert "Linear has no dsf mixer" in nothing and "SSD has n_heads=3" in one and "shared already" in again
        assert "Conv1d with parameters of its own" in unplanned
        assert "Own does not say how its heads are cut" in own and "whose ranks rise, got [1, 0]" in falling


def test_parameters_without_memory_start_in_their_own_order(of_two):
    """And a function around a layer, compiled as one graph, computes what it did."""
    assert all(found < 1e-9 for _, _, found, _ in of_two)


def test_four_ranks_and_two_by_two():
    for found, error, losses in spawned(4, four):
        assert list(found) == ON_FOUR and not any(found.values()), found
        assert error < 1e-9 and max(losses) < 1e-9


def test_training_goes_on_with_another_number_of_ranks(of_two):
    """Two ranks to one, and one to two: losses as if nothing had happened; the head is tied to the embedding."""
    assert all(max(losses) < 1e-9 for *_, losses in of_two)
