"""The fold of fragments' maps in one launch, in Triton's interpreter, against the same fold by torch operators."""

import pytest
import torch
from interpreted import interpreted

from dsf.kernels.affine import EMPTY, Frame
from dsf.parallel.fold import Fold
from dsf.parallel.layout import Layout

pytestmark = interpreted

FRAMES = {
    "nothing but F": Frame(5, 12),
    "a decay for a head": Frame(5, 12, kind="scale"),
    "a decay for a key": Frame(20, 12, kind="scale", rows=20),
    "a decay for every entry": Frame(5, 12, kind="scale", rows=5, columns=12),
    "vectors, numerators and divisors": Frame(1, 70, kind="scale", columns=35),
    "a matrix": Frame(20, 21, kind="dense"),
    "a matrix of few rows": Frame(3, 5, kind="dense"),
    "a running maximum": Frame(5, 13, gain=1, kind="scale"),
    "a running maximum for a channel, signed": Frame(1, 8, gain=4, kind="scale", columns=4, signed=True),
    "a running maximum for a key": Frame(5, 8, gain=1, kind="scale", rows=5),
}


def maps(frame: Frame, layout: Layout) -> torch.Tensor:
    """F and M of all fragments [ranks, slots, B, H, numbers]; M of the first one, which nobody may read, is NaN."""
    lead = (layout.ranks, layout.slots, 2, 3)
    f, move = torch.randn(*lead, frame.n, frame.total), torch.randn(*lead, *frame.move_shape)
    if frame.kind == "dense":
        move = move / (2 * frame.n**0.5)  # of norm 1, as a delta rule's: else products of several cancel digits
    if frame.gain and frame.signed:
        move[..., 1, :, :] = move[..., 1, :, :].sign()
    if frame.gain:
        f[layout.owner(1)][..., frame.plain :] = EMPTY  # nothing was written in it
        f[layout.owner(1)][..., : frame.plain] = 0
    move[layout.owner(0)] = float("nan")
    return frame.pack(f, move if frame.move_numbers else None)


@pytest.mark.parametrize("layout", [Layout("contiguous", 4), Layout("headtail", 3)], ids=lambda x: x.name)
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_one_launch_folds_as_torch_does(frame: Frame, layout: Layout) -> None:
    rows, count = maps(frame, layout), layout.fragments
    own = torch.randn(layout.ranks, layout.slots, 2, 3, frame.n, frame.plain)
    wanted = [[layout.number(r, s) for s in range(layout.slots)] for r in range(layout.ranks)]
    for numbers in [*wanted, list(range(count))]:
        how = frame, layout, [True] + [False] * (count - 1), numbers
        plain, fused = Fold(*how), Fold(*how, kernels=True)
        (states, kept), (found, keeps) = plain.forward(rows), fused.forward(rows)
        for n in numbers:
            torch.testing.assert_close(found[n], states[n], rtol=2e-6, atol=2e-6)
            following = [frame.gain_of(x[min(n + 1, len(x) - 1)]) for x in (found, states)]
            torch.testing.assert_close(*following, rtol=2e-6, atol=2e-6)
        if len(numbers) == 1:  # what is saved for the backward pass keeps no other fragments' states
            assert found[numbers[0]].untyped_storage().nbytes() <= 2 * 4 * 2 * 3 * frame.state_numbers
        assert [x.shape for x in keeps] == [x.shape for x in kept]
        for x, y in zip(keeps, kept, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)
        for x, y in zip(fused.backward(own, keeps), plain.backward(own, kept), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)
