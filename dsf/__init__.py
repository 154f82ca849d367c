"""dsf: sequence mixers declared as dynamical systems S_t = A_t S_{t-1} + B_t, y_t = C_tᵀ S_t + D_t.

    f = dsf.recurrence(function)      function takes inputs annotated dsf.Key, dsf.Value, ... and returns a dsf.System
    y = f(q, k, v, ...)               (y, final state) with return_state=True; f.step decodes, f.plan says what runs
    print(dsf.check(f))               compares every form of f with a float64 oracle, forward and backward
    f.trajectory(q, k, v, ...)        A, B, C and D of every token; dsf.analysis.measures takes it
    dsf.learn(loss, by=...)           a System from an objective in a dsf.Memory
    dsf.mixers                        the zoo: recurrences (gated_deltanet) and their papers' layers (GatedDeltaNet)
    dsf.models                        language models around any of them
    dsf.convert(model)                lets dsf run the mixers of an existing model
    dsf.parallel                      a sequence, or the heads of layers, over many ranks
    dsf.validate, dsf.testing         checks of calls while they run, and random inputs for your own tests

docs/tutorial.md is a first example, docs/language.md describes the whole language.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsf.call import guard
from dsf.call.long import long_convolution
from dsf.call.packing import Packing
from dsf.call.plan import Plan
from dsf.call.recurrence import Recurrence, recurrence
from dsf.call.tokenwise import tokenwise
from dsf.kernels.attention import KVCache
from dsf.language.annotations import Key, Pair, Param, Scalar, Steps, Value
from dsf.language.discretise import Discrete, bilinear, euler, zoh
from dsf.language.errors import DsfError, FormError, InputError, LawError, TraceError
from dsf.language.expr import Expr
from dsf.language.functions import (
    N,
    P,
    abs,
    atan2,
    cos,
    dot,
    elu1,
    exp,
    exp_features,
    expm1,
    l2norm,
    log,
    log1p,
    logsigmoid,
    maximum,
    minimum,
    pair,
    phi1,
    prev,
    quarter_turn,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    softplus,
    sqrt,
    sum_key,
    sum_value,
    tanh,
    taylor_features,
    where,
)
from dsf.language.learn import learn
from dsf.language.memory import Memory, inner, norm2
from dsf.language.operator import I, Operator, diag, outer, turn
from dsf.language.spec import Spec
from dsf.language.system import System, compose, ratio
from dsf.trajectory import Trajectory

__version__ = "0.1.0"

if guard.EVERYWHERE:
    from dsf.checking.validate import Guard

    guard.everywhere = Guard()
del guard  # no name of this package

if TYPE_CHECKING:  # what is lazy below
    from dsf import analysis as analysis
    from dsf import mixers as mixers
    from dsf import models as models
    from dsf import parallel as parallel
    from dsf import testing as testing
    from dsf.analysis.convert import convert as convert
    from dsf.checking.check import check as check
    from dsf.checking.validate import validate as validate
    from dsf.triton.names import register_operators as register_operators

# Subpackages and tools that are imported on first use: attribute -> module.
_LAZY = {
    "check": "dsf.checking.check",
    "validate": "dsf.checking.validate",
    "convert": "dsf.analysis.convert",
    "register_operators": "dsf.triton.names",
    "testing": "dsf.testing",
    "mixers": "dsf.mixers",
    "models": "dsf.models",
    "analysis": "dsf.analysis",
    "parallel": "dsf.parallel",
}


if not TYPE_CHECKING:  # or every name would be Any, those that are not there too

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'dsf' has no attribute {name!r}")
        module = importlib.import_module(_LAZY[name])
        return getattr(module, name) if name in ("check", "convert", "register_operators", "validate") else module


__all__ = [
    "Discrete", "DsfError", "Expr", "FormError", "I", "InputError", "KVCache", "Key", "LawError", "Memory", "N",
    "Operator", "P", "Packing", "Pair", "Param", "Plan", "Recurrence", "Scalar", "Spec", "Steps", "System",
    "TraceError", "Trajectory", "Value", "abs", "atan2", "bilinear", "compose", "cos", "diag", "dot", "elu1", "euler",
    "exp", "exp_features", "expm1", "inner", "l2norm", "learn", "log", "log1p", "logsigmoid", "long_convolution",
    "maximum", "minimum", "norm2", "outer", "pair", "phi1", "prev", "quarter_turn", "ratio", "recurrence", "relu",
    "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "sum_key", "sum_value", "tanh", "taylor_features",
    "tokenwise", "turn", "where", "zoh",
]  # fmt: skip
