"""Systems of Taylor features on the chunk kernels: torch computes the features, the kernels take them as keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsf.call.bind import Bound, Sizes, environment
from dsf.language.annotations import Input, Kind
from dsf.language.derived import derived, interned
from dsf.language.expr import KEY, Expr, children_first, inputs_of, rewritten
from dsf.language.frame import map_system, roots_of
from dsf.language.spec import Spec
from dsf.torch.evaluate import Evaluator
from dsf.triton import chunk
from dsf.triton.chunk import Timed


@dataclass(frozen=True)
class Featured:
    """A system with features as inputs. made: (the expression of each feature vector, the name of its input)."""

    spec: Spec
    made: tuple[tuple[Expr, str], ...]


def has_features(spec: Spec) -> bool:
    """True where the state's Key axis holds Taylor features."""
    return spec.features is not None and not spec.is_attention


@derived
def featured(spec: Spec) -> Featured:
    """The system with an input for each vector of features."""
    taken, found = {i.name for i in spec.inputs}, dict[Expr, Expr]()

    def of_node(node: Expr, _: tuple[Expr, ...]) -> Expr | None:
        if node.op == "taylor_features" and node not in found:
            name = f"features{len(found)}"
            while name in taken:
                name += "_"
            taken.add(name)
            found[node] = Expr("input", (), (name, None), frozenset({KEY}))
        return found.get(node)

    system = replace(map_system(spec.system, lambda x: rewritten(x, of_node)), drive=spec.drives or None)
    rule = [] if spec.rule is None else [spec.rule]
    used = {n.attrs[0] for n in inputs_of(*roots_of(system), *rule)}
    inputs = [i for i in spec.inputs if i.name in used]
    inputs += [Input(node.attrs[0], Kind(frozenset({KEY}))) for node in found.values()]
    plain = interned(replace(spec, inputs=tuple(inputs), system=system))
    return Featured(plain, tuple((source, node.attrs[0]) for source, node in found.items()))


def sizes_of(sizes: Sizes) -> Sizes:
    """Sizes of the system whose keys are the features."""
    return replace(sizes, keys=sizes.n)


def refusal(spec: Spec, sizes: Sizes, dtype: torch.dtype) -> str | None:
    """Why the matrix kernels cannot run the system, in the user's words; None when they can."""
    plain = featured(spec).spec
    sizes_read = any(x.op == "size" and x.attrs[0] == KEY for x in children_first(*roots_of(plain.system)))
    if sizes_read or any(i.kind.axes >= {KEY} for i in spec.inputs if i in plain.inputs):
        return "beside Taylor features the matrix kernels take no other use of the Key axis"
    refused = chunk.refusal(plain, sizes_of(sizes), dtype)
    return None if refused is None else refused.replace("N =", "features, N' =")


def made_of(spec: Spec, bound: Bound, timed: Mapping[str, Tensor]) -> tuple[Spec, Bound, Timed]:
    """The system whose keys are the features, and its inputs; features are rounded to the inputs' dtype."""
    found, sizes = featured(spec), bound.sizes
    values = Evaluator(environment(spec, bound, timed), sizes.keys, sizes.p)
    batch, tokens = next(iter(timed.values())).shape[:2]
    features = {
        name: values(source).squeeze(-1).expand(batch, tokens, sizes.heads, sizes.n).to(bound.dtype)
        for source, name in found.made
    }
    kept = {i.name for i in found.spec.inputs if i.kind.time}
    every = {**bound.tensors, **features}
    tensors = {i.name: every[i.name] for i in found.spec.inputs}
    moving = {name: x for name, x in {**timed, **features}.items() if name in kept}
    return found.spec, replace(bound, tensors=tensors, sizes=sizes_of(sizes)), moving


def run_matrix(
    spec: Spec, bound: Bound, timed: Timed, state: Tensor | None, bounds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As dsf.triton.chunk.run_matrix."""
    return chunk.run_matrix(*made_of(spec, bound, timed), state, bounds)
