"""A recurrence declared wrongly is refused where it is declared, with its name, its line and what is wrong."""

import copy
import dataclasses
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import dsf
from dsf import (
    I,
    Key,
    Pair,
    Param,
    Scalar,
    Steps,
    System,
    TraceError,
    Value,
    compose,
    diag,
    dot,
    exp,
    exp_features,
    outer,
    prev,
    turn,
)
from dsf.language import functions
from dsf.language.instead import hint, told


def operator_times_operator(q: Key, k: Key, v: Value):
    return System(A=outer(k, k) * I, B=k * v, C=q)


def operator_in_an_expression(q: Key, k: Key, v: Value):
    return System(A=I, B=k * exp(outer(k, k)), C=q * v)


def operator_as_injection(q: Key, k: Key, v: Value):
    return System(A=I, B=outer(k, q), C=v)


def key_scales_operator(q: Key, k: Key, v: Value, a: Key):
    return System(A=a * (I - outer(k, k)), B=k * v, C=q)


def not_linear(q: Key, k: Key, v: Value):
    return System(A="decay", B=k * v, C=q)


def two_conditions(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=dsf.where((a > 0) & (a < 1), a, 0.5), B=k * v, C=q)


def not_a_condition(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=dsf.where(~(a > 0), a, 0.5), B=k * v, C=q)


def power_of_an_operator(q: Key, k: Key, v: Value):
    return System(A=(I - outer(k, k)) ** 2, B=k * v, C=q)


def comparison_as_transition(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=a > 0, B=k * v, C=q)


def key_read_where_none_exists(q: Key, v: Value, a: Scalar):
    return System(A=a, B=v, C=q)


def key_left_over(k: Key, v: Value, a: Scalar):
    return System(A=a, B=k * v, C=v)


def sum_over_no_key(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q * dot(v, v))


def skip_with_key(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, D=q * v)


def no_readout(k: Key, v: Value):
    return System(A=I, B=k * v)


def unused(q: Key, k: Key, v: Value, gate: Scalar):
    return System(A=I, B=k * v, C=q)


def torch_function(q: Key, k: Key, v: Value):
    return System(A=I, B=torch.exp(k) * v, C=q)


def matmul_of_expressions(q: Key, k: Key, v: Value):
    return System(A=I, B=k @ v, C=q)


def branches(q: Key, k: Key, v: Value, a: Scalar):
    if a > 0:
        return System(A=a, B=k * v, C=q)
    return System(A=I, B=k * v, C=q)


def equality(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=dsf.where(a == 0, 1, a), B=k * v, C=q)


def unpacks(q: Key, k: Key, v: Value):
    first, _ = k
    return System(A=I, B=first * v, C=q)


def returns_an_expression(q: Key, k: Key, v: Value):
    return dot(q, k) * v


def only_params(q: Param[Key], k: Param[Key], v: Param[Value]):
    return System(A=I, B=k * v, C=q)


def mixed_features(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.taylor_features(k, 2) * v, C=q)


def mixed_features_in_one_product(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.taylor_features(k, 2) * k * v, C=q)


def features_without_quotient(q: Key, k: Key, v: Value):
    return System(A=I, B=exp_features(k) * v, C=exp_features(q))


def features_with_decay(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=a, B=exp_features(k) * v, C=exp_features(q), normalize=dsf.ratio)


def features_in_the_skip(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, D=dot(exp_features(q), exp_features(k)) * v)


def features_with_weights(q: Key, k: Key, v: Value, g: Scalar):
    return System(A=I, B=exp_features(k) * (g * v), C=exp_features(q), normalize=dsf.ratio)


def features_of_bent_values(q: Key, k: Key, v: Value):
    return System(A=I, B=exp_features(k) * dsf.tanh(v), C=exp_features(q), normalize=dsf.ratio, drive=v)


def inverse_quotient(q: Key, k: Key, v: Value):
    return System(A=I, B=exp_features(k) * v, C=exp_features(q), normalize=lambda num, den: num / num)


def ambiguous_drive(q: Key, k: Key, v: Value, w: Value):
    return System(A=I, B=k * v * w, C=q, normalize=dsf.ratio)


def no_drive(q: Key, k: Key, v: Value):
    return System(A=I, B=k * exp(v) * dsf.tanh(v), C=q, normalize=dsf.ratio)


def foreign_drive(q: Key, k: Key, v: Value, x: Value):
    return System(A=I, B=k * v, C=q, D=x, normalize=dsf.ratio, drive=x)


def foreign_drives(q: Key, k: Key, v: Value, x: Steps[Value, 2]):
    return System(A=I, B=k * v, C=q, D=x[0] * x[1], normalize=dsf.ratio, drive=x)


def drive_in_a_key(q: Key, k: Key, v: Value):
    return System(A=I, B=exp(k) * v, C=q, normalize=dsf.ratio, drive=k)


def drive_in_a_gain(q: Key, k: Key, v: Value):
    return System(A=I, B=exp(v) * k * v, C=q, normalize=dsf.ratio)


def drive_in_a_gain_of_the_skip(q: Key, k: Key, v: Value, x: Value):
    skip = exp(v) * x
    return System(A=I, B=exp(x) * k * v, C=q, D=skip, normalize=dsf.ratio)


def drive_for_nothing(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, drive=v)


def rule_of_one(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalize=lambda num: num)


def rule_of_many(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalize=lambda *parts: parts[0] / parts[1])


def rule_without_num(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalize=lambda num, den: 3)


def rule_is_no_rule(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalize="ratio")


def rule_branches(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalize=lambda num, den: num / den if den > 0 else num)


def rule_with_key(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalize=lambda num, den: num / (den + q))


def rule_of_no_degree(q: Key, k: Key, v: Value, i: Scalar):
    return System(A=I, B=exp(i) * k * v, C=q, normalize=lambda num, den: num / dsf.maximum(den, 1))


def wrong_read(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, read="now")


def gauge_with_axes(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, gauge=v)


def compose_reads_twice(q: Key, k: Key, v: Value):
    return compose(System(A=I, B=k * v, C=q), System(A=I, B=k * v, C=q))


def compose_of_nothing(q: Key, k: Key, v: Value):
    return compose()


def compose_of_expressions(q: Key, k: Key, v: Value):
    return compose(k * v, q)


def compose_reads_before_in_the_middle(q: Key, k: Key, v: Value):
    return compose(System(A=I, B=k * v, read="before"), System(A=I, B=k * v, C=q))


def python_mistake(q: Key, k: Key, v: Value):
    return System(A=I, B=k * missing_name, C=q)  # noqa: F821


def no_annotation(q: Key, k, v: Value):
    return System(A=I, B=k * v, C=q)


def foreign_annotation(q: Key, k: int, v: Value):
    return System(A=I, B=k * v, C=q)


def bare_param(q: Key, k: Param, v: Value):
    return System(A=I, B=k * v, C=q)


def unknown_annotation(q: Key, k: "Keys", v: Value):  # noqa: F821
    return System(A=I, B=k * v, C=q)


def default(q: Key, k: Key, v: Value = 1):
    return System(A=I, B=k * v, C=q)


def star(q: Key, *rest: Value):
    return System(A=I, B=q * rest[0], C=q)


def reserved_by_steps(q: Key, in_place: Key, v: Value):
    return System(A=I, B=in_place * v, C=q)


def reserved(q: Key, form: Key, v: Value):
    return System(A=I, B=form * v, C=q)


def key_and_value_in_outer(k: Key, v: Value):
    return System(A=I - outer(k, v), B=k * v, C=k)


def value_scales_operator(k: Key, v: Value):
    return System(A=v * (I - outer(v, v)), B=k * v, C=k)


def both_axes_in_a_sum(k: Key, v: Value):
    return System(A=I - outer(k, k) - outer(v, v), B=k * v, C=k)


def both_axes_in_a_product(k: Key, v: Value):
    return System(A=(I - outer(k, k)) @ (I - outer(v, v)), B=k * v, C=k)


def keys_decay_beside_values(k: Key, v: Value, g: Key):
    return System(A=diag(exp(g)) @ (I - outer(v, v)), B=k * v, C=k)


def quotient_of_mixed_channels(k: Key, v: Value):
    return System(A=I - outer(v, v), B=k * v, C=k, normalize=dsf.ratio)


def window_on_values(k: Key, v: Value):
    return System(A=I - outer(v, v), B=k * v, C=k, window=3)


def sum_of_reads_on_values(k: Key, v: Value):
    return System(A=I - outer(v, v), B=k * v, C=k + v)


def prev_of_a_param(q: Key, k: Key, v: Value, w: Param[Key]):
    before = prev(w)
    return System(A=I, B=k * v + before * v, C=q)


def prev_of_the_drive(q: Key, k: Key, v: Value):
    before = prev(v)
    return System(A=I, B=k * v + k * before, C=q, normalize=dsf.ratio, drive=v)


def turn_of_no_key(v: Value, a: Scalar):
    turned = turn(a)
    return System(A=turned, B=v, C=1)


def sum_of_systems(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=I, B=k * v, C=q) + System(A=a, B=k * v, C=q)


def scaled_system(q: Key, k: Key, v: Value, a: Scalar):
    return a * System(A=I, B=k * v, C=q)


def system_in_a_system(q: Key, k: Key, v: Value):
    return System(A=I, B=System(A=I, B=k * v), C=q)


def several_reads(q: Key, k: Key, v: Value, p: Key):
    return System(A=I, B=k * v, C=(q, p))


def all_micro_steps(q: Key, k: Steps[Key, 2], v: Value):
    return System(A=I, B=k * v, C=q)


def third_of_two(q: Key, k: Steps[Key, 2], v: Value):
    return System(A=I, B=k[2] * v, C=q)


def nothing_written(q: Key, k: Key, v: Value):
    return System(A=I, B=None, C=q)


def value_read(q: Value, k: Key, v: Value):
    return System(A=I, B=k * v, C=q)


def value_written(q: Key, k: Value, v: Value):
    return System(A=I, B=k * v, C=q)


def value_in_dot(q: Key, k: Key, v: Value):
    return System(A=dsf.sigmoid(dot(v, k)), B=k * v, C=q)


def value_of_unit_length(q: Key, k: Value, v: Value):
    return System(A=I, B=dsf.l2norm(k) * v, C=q)


def swapped(q: Key, k: Key, v: Value):
    return System(k * v, I, q)


def not_imported(q: Key, k: Key, v: Value):
    return System(A=I, B=softplus(k) * v, C=q)  # noqa: F821


def misspelt(q: Key, k: Key, v: Value):
    return System(A=I, B=dsf.softmaxplus(k) * v, C=q)


def misspelt_option(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, normalise=dsf.ratio)


def of_math(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=math.exp(a), B=k * v, C=q)


def of_numpy(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=np.exp(a), B=k * v, C=q)


def normalized_by_torch(q: Key, k: Key, v: Value):
    return System(A=I, B=torch.nn.functional.normalize(k, dim=-1) * v, C=q)


def imaginary(q: Key, k: Key, v: Value, a: Scalar):
    return System(A=exp(1j * a), B=k * v, C=q)


def tensor_in_it(q: Key, k: Key, v: Value):
    return System(A=torch.tensor(0.9), B=k * v, C=q)


def first_entry(q: Key, k: Key, v: Value):
    return System(A=I, B=k[0] * v, C=q)


def loop_over_keys(q: Key, k: Key, v: Value):
    return System(A=I, B=sum(k for _ in range(dsf.N)) * v, C=q)


def length_of_keys(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v / len(k), C=q)


def window_of_nothing(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q, window=0)


def angle_of_every_place(q: Key, k: Key, v: Value, a: Key):
    return System(A=turn(a), B=k * v, C=q)


def returns_nothing(q: Key, k: Key, v: Value):
    System(A=I, B=k * v, C=q)


def returns_two(q: Key, k: Key, v: Value):
    return System(A=I, B=k * v, C=q), q


def named_drive(q: Key, k: Key, v: Value, w: Value):
    return System(A=I, B=k * v * w, C=q, normalize=dsf.ratio, drive="v")


ON_A_LINE = [
    (
        sum_of_systems,
        r"a System is the whole .* in C, .* compose\(first, second\), .* outputs add",
        ") + S",
    ),
    (scaled_system, "a System is the whole of a recurrence", "a * System"),
    (system_in_a_system, "B: a System is the whole of a recurrence", "B=System"),
    (
        several_reads,
        r"C: expected .* got tuple: \(q, p\); several writes or reads are a sum, .* q \+ gate",
        "C=(q, p)",
    ),
    (all_micro_steps, r"`k` has an expression for each of its 2 micro-steps: k\[0\] is the first", "B=k * v"),
    (third_of_two, r"tuple index out of range; of Steps\[..., n\] inputs there are n, the first at 0", "k[2]"),
    (nothing_written, "B: expected an expression or a number, got NoneType: None; 0 is nothing", "B=None"),
    (
        value_in_dot,
        r"dot\(v, k\) sums over the Key axis, but `v` has none, .* annotate it Key, or write v",
        "dot(",
    ),
    (
        value_of_unit_length,
        r"sum_key\(k \* k\) .* over the Value axis: annotate it Key, or take sum_value",
        "l2norm(",
    ),
    (swapped, "B = I is an operator; only A is one, the first that System takes: A, B, C", "System(k * v, I, q)"),
    (not_imported, "name 'softplus' is not defined; from dsf import softplus$", "softplus(k)"),
    (misspelt, "module 'dsf' has no attribute 'softmaxplus'; near names of dsf: .*softplus", "softmaxplus"),
    (
        misspelt_option,
        r"unexpected keyword argument 'normalise'; it is System\(A, B, C, .*normalize=",
        "normalise",
    ),
    (of_math, "`a` has no number while the recurrence is declared: dsf's own functions", "math.exp(a)"),
    (of_numpy, r"numpy.exp does not take expressions, which have no numbers yet; write dsf\.exp$", "np.exp(a)"),
    (normalized_by_torch, r"torch\.normalize does not take expressions, .* write dsf\.l2norm$", "normalize(k"),
    (imaginary, "got complex: 1j; complex numbers are pairs of key entries: turn", "1j * a"),
    (tensor_in_it, "got Tensor: .*; give tensors as inputs", "torch.tensor"),
    (first_entry, r"`k\[0\]`: an expression has no parts to take; Steps\[...\] inputs have", "k[0]"),
    (loop_over_keys, "`N` has no number .* what is counted .* is a number of Python's own", "range("),
    (length_of_keys, r"len\(k\): expressions have no shape; N and P are the sizes", "len(k)"),
    (window_of_nothing, "window = 0: a window is a number of tokens, .* an integer of at least 1", "window=0"),
    (
        angle_of_every_place,
        r"turn\(a\): two neighbouring places turn by one .* annotate the angles Pair",
        "turn(a)",
    ),
    (
        key_and_value_in_outer,
        "outer\\(k, v\\) needs two Key expressions, but `v` has no Key axis; of two Value",
        "outer(",
    ),
    (value_scales_operator, r"`v` has a Value axis: write diag\(v\) @", "v * (I"),
    (torch_function, r"torch\.exp does not take expressions", "torch.exp(k)"),
    (matmul_of_expressions, r"\(k\) @ \(v\): @ multiplies operators", "k @ v"),
    (operator_times_operator, r"operators multiply with @, not \*", "A=outer"),
    (operator_in_an_expression, r"an operator on the Key axis \(`outer\(k, k\)`\) stands where", "exp(outer"),
    (operator_as_injection, r"B = outer\(k, q\) is an operator; only A is one", "B=outer"),
    (key_scales_operator, r"`a` has a Key axis: write diag\(a\) @", "a * (I"),
    (not_linear, "A is not a linear operator: expected an expression or a number, got str: 'decay'", 'A="decay"'),
    (comparison_as_transition, "A is not a linear operator: the comparison `a > 0` has no number", "A=a > 0"),
    (sum_over_no_key, r"sum_key\(v \* v\) sums over the Key axis, but its argument does not vary", "dot(v, v)"),
    (skip_with_key, r"D = q \* v has a Key axis; the skip is added to y", "D=q"),
    (branches, "a traced expression has no truth value: `a > 0` is not known", "if a > 0"),
    (equality, "compare with > or <", "a == 0"),
    (unpacks, r"`k` cannot be iterated over or unpacked; Steps\[...\] inputs can", "first, _ = k"),
    (mixed_features_in_one_product, "Key axes of different sizes meet: N and taylor2", "taylor_features"),
    (drive_for_nothing, "drive = v says what normalize replaces by ones, but there is no normalize", "drive=v"),
    (rule_is_no_rule, "normalize is a rule such as dsf.ratio, .* got 'ratio'", 'normalize="ratio"'),
    (rule_branches, "a traced expression has no truth value: `den > 0`", "if den > 0"),
    (wrong_read, 'read is "after" or "before", got \'now\'', 'read="now"'),
    (gauge_with_axes, r"gauge = v must be a Scalar expression, it varies over Value$", "gauge=v"),
    (two_conditions, r"for &: .*; a condition is one comparison: where\(a > 0, where\(b > 0, x, y\), y\)", "(a > 0) &"),
    (not_a_condition, "unary ~: .*; a condition is one comparison", "~(a > 0)"),
    (power_of_an_operator, r"'Operator' and 'int'; a power of an operator is a product, A @ A", "** 2"),
    (compose_reads_twice, "only the last micro-step is read: leave C, D, normalize, gauge and window out", "compose("),
    (compose_of_nothing, r"compose\(\) needs at least one System", "compose()"),
    (compose_of_expressions, "compose takes Systems, got Expr", "compose("),
    (compose_reads_before_in_the_middle, 'only the last micro-step is read: read="before" belongs to it', "compose("),
    (python_mistake, "name 'missing_name' is not defined", "missing_name"),
]

ON_THE_WHOLE = [
    (both_axes_in_a_sum, r"outer\(v, v\) acts on the Value axis and outer\(k, k\) on the Key axis; A acts on one"),
    (both_axes_in_a_product, r"outer\(v, v\) acts on the Value axis and outer\(k, k\) on the Key axis; A acts on one"),
    (keys_decay_beside_values, r"alike for every place of the Key axis, but `exp\(g\)` in A differs by place"),
    (quotient_of_mixed_channels, "mixes channels, which normalize divides one by one; leave normalize out"),
    (window_on_values, "a window keeps keys and values as they came, so A may only decay in it"),
    (sum_of_reads_on_values, r"C is made of Key expressions times Value ones; C = k \+ v is no sum"),
    (key_read_where_none_exists, "C = q reads the Key axis, but the state has none"),
    (key_left_over, "the state has a Key axis but C = v has none, so y would keep it"),
    (no_readout, "System needs a readout C"),
    (unused, "input `gate` is never used"),
    (returns_an_expression, "a recurrence returns a System, got Expr"),
    (returns_nothing, r"a recurrence returns a System, this one returns nothing: write return System\(...\)"),
    (
        returns_two,
        r"a recurrence returns a System, got tuple: several steps of a token are dsf\.compose\(first",
    ),
    (value_read, r"C = q has none, so y would keep it; contract it with a Key readout \(here q: Value\)"),
    (value_written, r"C = q reads the Key axis, but .* as in B = k \* v of a Key k .* \(here k: Value, v: Value\)"),
    (named_drive, "drive = 'v' is no input; drive takes the input itself"),
    (only_params, "every input is a Param; a recurrence needs at least one input of tokens"),
    (mixed_features, "the state's Key axis holds N entries and taylor2 at once"),
    (features_without_quotient, "exponential features have the kernel trick only as softmax attention"),
    (features_with_decay, "A = a: beside softmax attention a decay is a bias of scores, .* so it must be positive"),
    (features_in_the_skip, "exponential features have the kernel trick only as softmax attention"),
    (features_with_weights, "with v = 1 there remains g in B, which would be in that sum too"),
    (features_of_bent_values, "with v = 1 there remains tanh.1. in B, which would be in that sum too"),
    (inverse_quotient, "exponential features have the kernel trick only as softmax attention"),
    (ambiguous_drive, r"which input drives it is not clear: expected one bare Value factor in B, found v, w; pass"),
    (no_drive, "found none; give what is written as an input of its own, or pass System"),
    (foreign_drive, "drive = x does not occur in B"),
    (foreign_drives, r"drive = x\[0\] does not occur in B"),
    (drive_in_a_key, "driven by ones, but k, which drives it, also occurs in `k`, which both have in common; give"),
    (drive_in_a_gain, "driven by ones, but v, which drives it, also occurs in `v`, which both have in common; give"),
    (drive_in_a_gain_of_the_skip, "driven by ones, but v, which drives it, also occurs in `v`, which both have in"),
    (rule_without_num, "normalize = 3 does not use num, the output that it normalises"),
    (rule_of_one, r"normalize takes rule\(num, den\) or rule\(num, den, one\), not rule\(num\)"),
    (rule_of_many, r"normalize takes rule\(num, den\) or rule\(num, den, one\), not rule\(\*parts\)"),
    (rule_with_key, r"normalize = num / \(den \+ q\) has a Key axis, but y has none"),
    (rule_of_no_degree, "changes when num and den are scaled alike.* write the rule with .*one"),
]

ON_THE_SIGNATURE = [
    (no_annotation, "input `k` needs an annotation saying its axes .* got none"),
    (foreign_annotation, "input `k` needs an annotation saying its axes .* got <class 'int'>"),
    (bare_param, "input `k` needs an annotation saying its axes"),
    (unknown_annotation, "the annotation `Keys` of input `k` fails: name 'Keys' is not defined"),
    (default, "input `v` has a default; inputs are tensors, given at every call"),
    (star, r"\*rest is not possible, a recurrence names its inputs"),
    (reserved_by_steps, "no input can be called `in_place`, calls have an option of that name"),
    (reserved, "no input can be called `form`, calls have an option of that name"),
]


ABOUT_A_PART = [
    (prev_of_a_param, r"prev\(w\): Params are the same for every token; prev takes what changes", "before = prev(w)"),
    (prev_of_the_drive, r"prev\(v\): normalize divides .* leave it out of prev", "before = prev(v)"),
    (turn_of_no_key, r"turn\(a\) turns pairs .* A is no operator on Key; write along one", "turned = turn(a)"),
]


def refused(function) -> str:
    with pytest.raises(TraceError) as caught:
        dsf.recurrence(function)
    text = str(caught.value)
    assert text.startswith(f"{function.__name__}: ") and text.count(f"{function.__name__}: ") == 1, text
    return text


@pytest.mark.parametrize("function, text, line", ON_A_LINE, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_name_the_recurrence_and_the_line(function, text, line):
    first, _, place = refused(function).partition("\n")
    assert re.search(text, first)
    path, number, source = place.strip().split(":", 2)
    start = function.__code__.co_firstlineno
    assert path == __file__ and start < int(number) < start + 5
    assert line in source


def test_a_guess_of_python_gives_way_to_what_is_to_be_written():
    # As Python 3.13 words it; earlier ones say nothing more.
    guessed = "System.__init__() got an unexpected keyword argument 'normalise'. Did you mean 'normalize'?"
    assert re.search(r"argument 'normalise'; it is System\(A, B, C, .*normalize=", told(TypeError(guessed)))


@pytest.mark.parametrize("function, text", ON_THE_WHOLE, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_of_the_whole_system_name_the_recurrence_and_where_it_is(function, text):
    """That of the System; that of the def where it is no matter of the System."""
    first, _, place = refused(function).partition("\n")
    assert re.search(text, first)
    start, lines = function.__code__.co_firstlineno, Path(__file__).read_text().splitlines()
    own = [place.strip() == f"{__file__}:{n}: {lines[n - 1].strip()}" for n in (start, start + 1, start + 2)]
    signed = function in (unused, only_params, returns_an_expression, returns_nothing, returns_two)
    assert own[0] if signed else True in own[1:]


@pytest.mark.parametrize("function, text, line", ABOUT_A_PART, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_about_a_part_of_the_system_name_its_line(function, text, line):
    first, _, place = refused(function).partition("\n")
    assert re.search(text, first) and place.strip().split(": ", 1)[1] == line


def test_lines_are_those_of_the_declaration_that_is_being_made():
    """One of another file's, or one inside another, names its own; decorators are above the def."""

    def outside(q: Key, k: Key, v: Value):
        refused(unused)
        return System(A=I, B=k * v, C=dot(q, k) * v)

    assert "C=dot" in refused(outside).partition("\n")[2]
    with pytest.raises(TraceError, match="def decorated"):

        @dsf.recurrence
        def decorated(q: Key, k: Key, v: Value, gate: Scalar):
            return System(A=I, B=k * v, C=q)


@pytest.mark.parametrize("made", ["turn", "pair"])
def test_an_odd_number_of_keys_is_refused_with_the_line_that_takes_them_in_pairs(made):
    @dsf.recurrence
    def taken(q: Key, k: Key, v: Value, a: Scalar):
        by_two = dsf.turn(a) if made == "turn" else dsf.diag(dsf.pair(a, 1))
        return System(A=by_two, B=k * v, C=q)

    x = torch.randn(1, 2, 1, 3)
    text = rf"taken: {made} takes places .* so N must be even, but `q` has N = 3\n  {re.escape(__file__)}:\d+: by_two ="
    with pytest.raises(dsf.InputError, match=text):
        taken(x, x, x, x[..., 0])
    with pytest.raises(dsf.InputError, match=r"N must be even, got N = 3\n  .*: by_two ="):
        taken.plan(T=4, N=3, P=2)


@pytest.mark.parametrize("n, right", [(3, "even, twice N/2"), (4, "twice N/2")])
def test_keys_that_do_not_fit_an_angle_a_pair_are_refused_with_the_line_of_the_turn(n, right):
    @dsf.recurrence
    def angled(q: Key, k: Key, v: Value, t: Pair):
        by_two = dsf.turn(t)
        return System(A=by_two, B=k * v, C=q)

    x = torch.randn(1, 2, 1, n)
    said = rf"`t` has .* N/2 = 1, but `q` has N = {n}; N must be {right}\n  {re.escape(__file__)}:\d+: by_two ="
    with pytest.raises(dsf.InputError, match=said):
        angled(x, x, x, x[..., :1])


def test_numbers_of_numpy_are_numbers():
    """On either side, and of any width: they have arithmetic of their own, which leaves expressions alone."""

    @dsf.recurrence
    def counted(q: Key, k: Key, v: Value, a: Scalar):
        a = dsf.where(a > np.float64(0.5), a, np.float32(0.5))
        return System(A=a - np.float64(0), B=np.float64(2) * k * v * np.float32(2), C=q / np.int64(2))

    plain = counted.spec.system
    assert (str(plain.A), str(plain.B), str(plain.C)) == ("where(a > 0.5, a, 0.5)", "2 * k * v * 2", "q / 2")


@pytest.mark.parametrize("function, text", ON_THE_SIGNATURE, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_of_the_signature_name_the_input(function, text):
    assert re.search(text, refused(function))


@pytest.mark.parametrize("mark", [lambda: Steps[Key], lambda: Steps[Key, 0], lambda: Steps[Key, 1.5], lambda: Steps[2]])
def test_steps_need_axes_and_a_number(mark):
    with pytest.raises(TraceError, match="Steps takes axes and a positive number of micro-steps"):
        mark()


def test_param_takes_axes():
    with pytest.raises(TraceError, match=r"Param\[...\] takes Key, Pair, Value or Scalar; got 'N'"):
        Param["N"]


@pytest.mark.parametrize("thing", [3, "text", System])
def test_only_functions_are_recurrences(thing):
    with pytest.raises(TraceError, match="a recurrence is declared by a function that returns a System"):
        dsf.recurrence(thing)


def test_nothing_is_divided_by_nought():
    """It was declared, and failed when it was planned or called, without a name or a line."""
    with pytest.raises(TraceError, match=r"^zero: `k \* v / 0` is not a real number(.|\n)*test_tracing_errors.py:"):

        @dsf.recurrence
        def zero(q: Key, k: Key, v: Value):
            return System(A=I, B=k * v / 0, C=q)


@pytest.mark.parametrize(
    "text", ["sqrt(-1)", "rsqrt(0)", "log(0)", "log(sin(4))", "log1p(-2)", "exp(1000)", "sin(float('inf'))"]
)
def test_a_function_of_a_number_where_it_has_no_value_is_refused_with_the_line(text):
    """Every output was nan, or infinite."""
    names = {name: getattr(functions, name) for name in ("sqrt", "rsqrt", "log", "sin", "log1p", "exp")}

    def bad(q: Key, k: Key, v: Value):
        return System(A=0.5, B=k * v, C=q * eval(text, names))

    with pytest.raises(
        TraceError, match=rf"^bad: `{re.escape(text)}` is not a real number(.|\n)*test_tracing_errors.py:"
    ):
        dsf.recurrence(bad)


def test_functions_of_numbers_that_have_a_value_stay():
    @dsf.recurrence
    def good(q: Key, k: Key, v: Value):
        infinite = dsf.exp(-float("inf")) + dsf.tanh(float("inf"))
        return System(A=0.5, B=k * v, C=q * functions.sqrt(dsf.log(2) + infinite) * functions.rsqrt(2))

    q, k, v = (torch.ones(1, 1, 1, 1) for _ in "qkv")
    torch.testing.assert_close(good(q, k, v).item(), math.sqrt((math.log(2) + 1) / 2))


@pytest.mark.parametrize("name", [3, System], ids=str)
def test_names_of_recurrences_are_words(name):
    with pytest.raises(TraceError, match=r"recurrence\(name=\.\.\.\) is the name of the recurrence, a string, got"):
        dsf.recurrence(name=name)


def test_only_softmax_has_a_taylor_truncation():
    @dsf.recurrence
    def plain(q: Key, k: Key, v: Value):
        return System(A=I, B=k * v, C=q)

    with pytest.raises(TraceError, match="plain: only exponential features have a Taylor truncation"):
        plain.taylor(2)


def test_annotations_may_be_strings_and_see_the_enclosing_function():
    n = 2

    @dsf.recurrence(name="renamed")
    def inner(q: "Key", k: "Steps[Key, n]", v: "Steps[dsf.Value, 2]", w: "Param[Key, Value]"):
        """Its doc."""
        assert isinstance(k, tuple) and len(k) == len(v) == n
        return compose(*(System(A=diag(w), B=key * value, C=None) for key, value in zip(k[:1], v[:1], strict=True)),
                       System(A=I, B=k[1] * v[1], C=q))  # fmt: skip

    assert (inner.name, inner.__doc__) == ("renamed", "Its doc.")
    assert [str(i.kind) for i in inner.spec.inputs] == ["Key", "Steps[Key, 2]", "Steps[Value, 2]", "Param[Key, Value]"]


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda k, v: k.T @ v, r"`k\.T`: .*meet by name; k \* v of a Key and a Value is the outer product"),
        (lambda k, v: v.transpose(0, 1), r"`v\.transpose`: .*dot\(a, b\) the inner one"),
        (lambda k, v: k.sigmoid() * v, r"`k\.sigmoid`: write sigmoid\(k\)"),
        (lambda k, v: (k * v).sum(-1), r"`\(k \* v\)\.sum`: write sum_key\(k \* v\) or sum_value\(k \* v\)"),
        (lambda k, v: k / k.shape[-1] * v, r"`k\.shape`: expressions have no shape; N and P are the sizes"),
        (lambda k, v: k.softsign() * v, r"`k\.softsign`: expressions have no 'softsign'"),
    ],
)
def test_what_tensors_have_is_answered_with_what_to_write(write, text):
    def tensor_like(q: Key, k: Key, v: Value):
        return System(A=I, B=write(k, v), C=q)

    with pytest.raises(TraceError, match=r"(?s)^tensor_like: " + text + r".*\n.*test_tracing_errors\.py:\d+"):
        dsf.recurrence(tensor_like)


def test_expressions_have_no_attributes_that_copies_or_checks_stumble_on():
    k = dsf.Expr("input", (), ("k", None), frozenset({"key"}))
    assert not hasattr(k, "T") and not hasattr(k, "__array__") and copy.copy(k) is k is pickle.loads(pickle.dumps(k))


def test_the_options_of_a_system_are_written_in_their_order():
    """In the page and in the error: given by position they would be taken in another one."""
    names = [f.name for f in dataclasses.fields(System)][:9]
    page = (Path(__file__).parents[1] / "docs/language.md").read_text()
    for text in (page, hint(TypeError("System.__init__() missing"))):
        found = re.search(r"System\((A, B, C.*?)\)", text)
        assert found and [x.partition("=")[0] for x in found[1].split(", ")] == names


def test_inputs_of_another_declaration_are_refused():
    """A helper that keeps an expression from one declaration to the next; a call ended in a KeyError."""
    kept = []

    def gate(x):
        kept.append(dsf.sigmoid(x))
        return kept[0]

    @dsf.recurrence
    def first(q: Key, k: Key, v: Value, a: Scalar):
        return System(A=gate(a), B=k * v, C=q)

    def second(q: Key, k: Key, v: Value, b: Scalar):
        return System(A=gate(b), B=k * v, C=q * b)

    def third(q: Key, k: Key, v: Value, a: Value):
        return System(A=gate(a), B=k * v, C=q, D=a)

    for wrong in (second, third):
        assert re.search("`a` is an input of another declaration, not of this one; make", refused(wrong))


def test_a_recurrence_inside_another_is_answered_with_what_to_write():
    @dsf.recurrence
    def inside(q: Key, k: Key, v: Value):
        return System(A=0.9, B=k * v, C=q)

    def outside(q: Key, k: Key, v: Value):
        return System(A=0.5, B=k * inside(q, k, v), C=q)

    assert re.search(
        "got Expr; recurrences are called on tensors: call this one before, and give its y", refused(outside)
    )
