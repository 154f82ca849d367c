"""Random declarations in Triton's interpreter: the tiles, dtypes, views and packed sequences that a GPU gets."""

import pytest
import test_gpu_matrix
from interpreted import interpreted
from test_gpu_random import assert_errs_as_its_inputs_rounding_does

pytestmark = interpreted


@pytest.mark.parametrize("seed", range(1, 256, 32))
def test_a_random_declaration_errs_as_its_inputs_rounding_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu_matrix, "DEVICE", "cpu")
    assert_errs_as_its_inputs_rounding_does(seed)
