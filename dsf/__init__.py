"""dsf: sequence mixers declared as dynamical systems S_t = A_t S_{t-1} + B_t, y_t = C_tᵀ S_t + D_t.

Declare a recurrence with @dsf.recurrence, call it on tensors, compare its forms with dsf.check, see docs/language.md.
"""

from __future__ import annotations

import importlib
from typing import Any

from dsf.call import guard
from dsf.call.long import long_convolution
from dsf.call.packing import Packing
from dsf.call.plan import Plan
from dsf.call.recurrence import Recurrence, recurrence
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
    "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "sum_key", "sum_value", "tanh", "taylor_features", "turn",
    "where", "zoh",
]  # fmt: skip
