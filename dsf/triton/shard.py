"""One shard of a sequence on the GPU kernels, in four passes with collectives between them (dsf.parallel).

Forward: `summary` computes the shard's effect on a state, then `forward` runs from the entering state. Backward:
`adjoint` computes the gradient of the entering state from the shard's own outputs, then `backward` runs from the
gradient of the final state. The second pass of each pair reuses results (`held`) of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dsf.call.bind import Bound
from dsf.call.plan import Plan
from dsf.kernels.affine import Frame
from dsf.language.reads import apart
from dsf.language.spec import Spec
from dsf.triton import chunk, scan
from dsf.triton.choose import is_scan


def takes(spec: Spec, bound: Bound, plan: Plan) -> bool:
    """Whether the kernels have the four passes for a call with this plan."""
    if plan.backend != "triton" or plan.one_step or spec.is_softmax or spec.is_framed or not bound.sizes.tokens:
        return False
    if spec.system.solve is not None:  # the passes know nothing of the states that it reads
        return False
    if is_scan(spec):  # also for calls that one rank would run by chunks
        return spec.rule is None and not scan.mixes(spec) and scan.refusal(spec, bound.sizes, bound.dtype) is None
    if apart(spec) or spec.acts_on_values or spec.features is not None:
        return False
    whole = chunk.channels(spec, bound.sizes.p) == bound.sizes.p
    return whole and bound.sizes.batch * bound.sizes.heads <= chunk.GRID


@dataclass
class Shard:
    """The operands of one shard's kernels, and the kernels' name. scans: for the fused scan, not the chunk kernels."""

    operands: list[Tensor]
    name: str
    scans: bool

    @staticmethod
    def of(spec: Spec, bound: Bound) -> Shard:
        """The shard of a call. Operands are the inputs, or computed from them by operators that autograd knows."""
        if is_scan(spec):
            return Shard(*scan.operands_and_hole(spec, bound), True)
        return Shard([bound.tensors[i.name] for i in spec.inputs], chunk.program_of(spec)[1], False)

    def multiplies(self, frame: Frame) -> bool:
        """Whether `summary` has M as the frame stores it: with a running maximum, of one positive decay for a head."""
        if not frame.gain:
            return frame.kind in ("dense", "scale")
        return frame.kind == "scale" and frame.rows == frame.columns == 1 and not frame.signed and not self.scans

    def summary(self, state: Tensor | None, moves: bool, keep: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(the state after the shard, from `state` or from zero; M if `moves`; what `forward` takes as `held`).

        M: what the shard multiplies a state by. keep: whether `forward` will be called with it.
        """
        if self.scans:
            from dsf.kernels.triton.scan.operator import scan_shard

            return scan_shard(self.operands, None, state, self.name, moves)
        from dsf.kernels.triton.chunk.shard import matrix_shard

        return matrix_shard(self.operands, state, self.name, moves, keep)

    def forward(self, state: Tensor | None, keep: bool, held: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """y, the state after the shard, and if `keep` what `adjoint` and `backward` take as `saved`."""
        if self.scans:
            from dsf.kernels.triton.scan.operator import scan as operator

            y, final, saved = operator(self.operands, state, self.name, keep, False, None, 0, list(held))
            return y, final, [saved]
        from dsf.kernels.triton.chunk.operator import matrix_mixer
        from dsf.kernels.triton.pointwise.programs import PROGRAMS

        y, final, kept = matrix_mixer(self.operands, state, self.name, keep, None, list(held))
        return y, final, [*kept, y] if keep and PROGRAMS[self.name].quotient else kept

    def held_back(self, held: Sequence[Tensor]) -> list[Tensor]:
        """What `adjoint` takes of the results of `summary`."""
        return [] if self.scans else list(held[:2])

    def adjoint(
        self, dy: Tensor, dfinal: Tensor | None, state: Tensor | None, saved: Sequence[Tensor], held: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The gradient of the shard's first state, without columns of a running maximum, and `held` of `backward`."""
        if self.scans:
            from dsf.kernels.triton.scan.operator import scan_shard

            found, _, later = scan_shard(self.operands, dy, dfinal, self.name, False)
            return found, later
        from dsf.kernels.triton.chunk.shard import matrix_shard_adjoint

        first, later = matrix_shard_adjoint(dy, dfinal, self.operands, state, list(saved), self.name, list(held))
        return first, later

    def backward(
        self, dy: Tensor, dfinal: Tensor | None, state: Tensor | None, saved: Sequence[Tensor], needs: Sequence[bool],
        held: Sequence[Tensor],
    ) -> tuple[list[Tensor | None], Tensor]:  # fmt: skip
        """Gradients of the operands (None where not needed), and of the first state."""
        if self.scans:
            from dsf.kernels.triton.scan.operator import scan_adjoint

            found, first = scan_adjoint(
                dy, dfinal, self.operands, saved[0], self.name, list(needs), None, list(held)
            )  # fmt: skip
        else:
            from dsf.kernels.triton.chunk.operator import matrix_mixer_backward

            found, first = matrix_mixer_backward(
                dy, dfinal, self.operands, state, list(saved), self.name, list(needs), None, list(held)
            )  # fmt: skip
        given = iter(found)
        return [next(given) if need else None for need in needs], first

    def like(self, operands: Sequence[Tensor]) -> Shard:
        """The same kernels with other operands."""
        return Shard(list(operands), self.name, self.scans)
