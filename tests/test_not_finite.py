"""A NaN or infinity in one packed sequence reaches no output, state or gradient of another, in any form.

Kernels: tests/test_triton_packed.py and tests/test_triton_scan.py.
"""

import mixer_inputs
import pytest
import structures
from not_finite import BOUNDS, assert_alone, first_states

from dsf.mixers import ZOO

MIXERS = [entry.recurrence for entry in ZOO if entry.recurrence is not None]


@pytest.mark.parametrize(
    ("recurrence", "kit"),
    [*((r, structures) for r in structures.ALL), *((r, mixer_inputs) for r in MIXERS)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_in_every_form(recurrence, kit):
    """A NaN from no states, and infinity from some, where a state is no cache."""
    count = len(BOUNDS) - 1
    given = kit.sample(recurrence, 1, BOUNDS[-1])
    start = first_states(recurrence, given, kit.sample(recurrence, count, 3))
    for form in recurrence.forms:
        for state, value in ((None, float("nan")), (start, float("inf"))):
            assert_alone(recurrence, given, state, value, form=form, backend="torch")
