"""The mark of tests that run kernels in Triton's interpreter: it is switched on before triton is imported, or never."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in a process of its own, with TRITON_INTERPRET=1")
