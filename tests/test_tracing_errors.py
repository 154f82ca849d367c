"""A recurrence declared wrongly is refused where it is declared, with its name, its line and what is wrong."""

import copy
import pickle
import re

import pytest
import torch

import dsf
from dsf import I, Key, Param, Scalar, Steps, System, TraceError, Value, compose, diag, dot, exp, exp_features, outer


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


ON_A_LINE = [
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
    (gauge_with_axes, r"gauge = v must be a Scalar expression, it varies over \{'value'\}", "gauge=v"),
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
    (only_params, "every input is a Param; a recurrence needs at least one input with a token axis"),
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
    (reserved, "no input can be called `form`, calls have an option of that name"),
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


@pytest.mark.parametrize("function, text", ON_THE_WHOLE, ids=lambda x: getattr(x, "__name__", ""))
def test_errors_of_the_whole_system_name_the_recurrence_and_where_it_is(function, text):
    first, _, place = refused(function).partition("\n")
    assert re.search(text, first)
    assert place.strip() == f"{__file__}:{function.__code__.co_firstlineno}"


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
