"""A NaN or infinity in one packed sequence reaches no output, state or gradient of another, in any form.

Kernels: tests/test_triton_packed.py and tests/test_triton_scan.py.
"""

import mixer_inputs
import pytest
import structures
from not_finite import BOUNDS, assert_alone, first_states, sums_angles

from dsf.mixers import ZOO

MIXERS = [entry.recurrence for entry in ZOO if entry.recurrence is not None]


def assert_alone_in(recurrence, kit, value):
    """In every form, from no states and from some; turned ones by the definition alone."""
    count = len(BOUNDS) - 1
    given = kit.sample(recurrence, 1, BOUNDS[-1])
    start = first_states(recurrence, given, kit.sample(recurrence, count, 3))
    for form in ["naive"] if sums_angles(recurrence) else recurrence.forms:
        for state in [None] if start is None else [None, start]:
            assert_alone(recurrence, given, state, value, form=form, backend="torch")


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("recurrence", structures.ALL, ids=lambda r: r.name)
def test_in_every_form_of_every_structure(recurrence, value):
    assert_alone_in(recurrence, structures, value)


@pytest.mark.parametrize("recurrence", MIXERS, ids=lambda r: r.name)
def test_in_every_form_of_the_zoo(recurrence):
    assert_alone_in(recurrence, mixer_inputs, float("nan"))
