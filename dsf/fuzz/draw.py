"""Random cases of a recurrence. On a GPU the cases of one kind share everything that kernels are compiled for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsf.call.recurrence import Recurrence
from dsf.checking.examples import regimes_of
from dsf.checking.measure import KERNELS, Subject
from dsf.checking.values import Range
from dsf.fuzz.case import EXPANDED, LAYOUTS, Case
from dsf.language.expr import children_first
from dsf.triton.choose import is_scan

RESIDUES = 64  # T takes every residue of this modulus, for any chunk length of a kernel


@dataclass(frozen=True)
class Profile:
    """The distribution of random cases for a device and backend.

    n, p, heads, batches: possible sizes; longest: the most tokens; far: the share of lengths above 2 · RESIDUES. alike:
    the number of cases of one kind, with the same dtype, N, P, heads, layouts and options. dtypes, calls: possible
    values, the more frequent ones repeated. other: the share of kinds with calls of another recurrence between. scans:
    the most tokens of fused scans, which the interpreter runs token by token. pool: the number of combinations of N, P,
    heads and dtype for one seed, so that its declarations share compiled kernels; 0: any. ways: the share of kinds
    called inside torch.compile or by torch.func (torch forms); 0: also no shorter calls between. drawn: the pool.
    """

    n: tuple[int, ...]
    p: tuple[int, ...]
    heads: tuple[int, ...]
    batches: tuple[int, ...]
    longest: int
    far: float
    alike: int
    dtypes: tuple[str, ...]
    calls: tuple[int, ...]
    other: float
    scans: int = 10_000
    pool: int = 0
    ways: float = 0.0
    drawn: tuple[tuple[int, int, int, str], ...] = ()

    def of_seed(self, seed: int) -> Profile:
        """The profile with its pool drawn."""
        rng = random.Random(seed)
        sizes = [
            (rng.choice(self.n), rng.choice(self.p), rng.choice(self.heads), rng.choice(self.dtypes))
            for _ in range(self.pool)
        ]
        return replace(self, drawn=tuple(sizes))


SMALL = (1, 2, 3, 4, 5, 6, 7)
HALVES = ("bfloat16", "bfloat16", "bfloat16", "float32", "float32", "float16")
TORCH = Profile(SMALL, SMALL, (1, 2, 2, 3, 4), (1, 2), 130, 0.05, 2, ("float64",) * 4 + ("float32",), (1, 2, 3), 0.5)
INTERPRETER = Profile((1, 2, 3), (1, 3, 4), (1, 1, 1, 2), (1,), 20, 0.0, 2, HALVES, (1, 1, 1, 1, 3), 0.1, scans=5)
GPU = Profile(
    (1, 3, 8, 16, 16, 17, 24, 32, 40, 64, 64, 100, 128), (1, 5, 8, 16, 17, 32, 40, 64, 64, 100, 128), (1, 2, 2, 3, 4),
    (1, 2, 3), 900, 0.08, 24, HALVES, (1, 3, 3, 4, 4), 0.25, pool=12,
)  # fmt: skip


class Cases:
    """Random cases of one recurrence, one kind after the other; `rng` is the only source of randomness.

    empty: include sequences without tokens. residue: the first residue of T modulo RESIDUES. device: of the calls.
    """

    def __init__(
        self, recurrence: Recurrence, ranges: Mapping[str, Range], rng: random.Random, profile: Profile, backend: str,
        empty: bool, residue: int = 0, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.recurrence, self.ranges, self.rng, self.profile = recurrence, ranges, rng, profile
        self.backend, self.empty = backend, empty
        self.left, self.kind = 0, Case()
        self.residue, self.device = residue, device
        self.other = self.heads = False
        self.inputs = recurrence.spec.inputs
        # With N = 1 a normalised vector is constant, and so is the query's factor in a quotient: their gradients are
        # exactly 0, and a relative error of rounding means nothing.
        unchanged = _has_directions(recurrence) or recurrence.spec.rule is not None
        turned = recurrence.spec.keys_of(1) == 2  # the Key axis holds pairs
        self.keys = [n for n in profile.n if not (n == 1 and unchanged) and not (n % 2 and turned)]

    def draw(self) -> Case:
        """The next case."""
        if not self.left:
            self.kind, self.left = self._kind(), self.profile.alike
            self.other = self.rng.random() < self.profile.other
            self.heads = self.rng.random() < self.profile.other
        self.left -= 1
        return self._one(self.kind)

    def _kind(self) -> Case:
        """A random kind: the fields that a kernel is compiled for."""
        rng, profile = self.rng, self.profile
        form = KERNELS if self.backend == KERNELS else rng.choice(self.recurrence.forms[1:])
        n, p, heads, dtype = rng.choice(profile.drawn) if profile.drawn else (0, 0, 0, "")
        dtype = dtype or rng.choice(profile.dtypes)
        heads = heads or rng.choice(profile.heads)
        timed = [i.name for i in self.inputs if i.kind.time]
        fewer = [g for g in range(1, heads) if heads % g == 0]
        groups = {n: rng.choice(fewer) for n in timed[1:] if fewer and rng.random() < 0.3}
        layouts = {n: rng.choice(LAYOUTS[1:]) for n in self._names if rng.random() < 0.35} if rng.random() < 0.6 else {}
        if rng.random() < 0.3:
            layouts["dy"] = rng.choice([*EXPANDED, "transposed", "strided"])
        if rng.random() < 0.15:
            layouts[rng.choice(timed)] = rng.choice(EXPANDED)
        if rng.random() < 0.12:  # strides of parts of longer sequences do not tell the number of heads
            layouts = dict.fromkeys(timed, "late")
        loss = rng.choice(["both"] * 6 + ["y", "y", "y", "state", ""])
        frozen = tuple(n for n in self._names if rng.random() < 0.4) if rng.random() < 0.25 else ()
        case = Case(
            heads=heads, n=n if n in self.keys else rng.choice(self.keys), p=p or rng.choice(profile.p), dtype=dtype,
            form=form, groups=groups,
            layouts=layouts, initial=rng.random() < 0.4, loss=loss,
            frozen=frozen if len(frozen) < len(self._names) else (), lengths=(1,) if rng.random() < 0.3 else (),
        )  # fmt: skip
        if rng.random() < (0.08 if form == KERNELS else 0.3) and self._steps(case):
            case = replace(case, step=True, lengths=(), loss="" if form == KERNELS else case.loss)
        case = replace(case, reverse=not case.step and rng.random() < 0.15)
        if not self.profile.ways or case.step or case.lengths or form == KERNELS or self.recurrence.spec.is_attention:
            return case
        ways = ["func"] * (form == "recurrent" and bool(case.loss)) + ["compiled"]
        return replace(case, way=rng.choice(ways) if rng.random() < self.profile.ways else "")

    @property
    def _names(self) -> list[str]:
        return [i.name for i in self.inputs]

    def _steps(self, case: Case) -> bool:
        """True where the form can run token by token."""
        if case.form != KERNELS:
            return case.form == "recurrent"
        return Subject(self.recurrence, self.ranges, None, self.device, KERNELS).has_decode_kernel

    def _one(self, kind: Case) -> Case:
        rng, profile = self.rng, self.profile
        tokens = self._tokens(self._longest(kind))
        calls = rng.choice(profile.calls)
        regimes = {}
        for i in self.inputs:
            if rng.random() < 0.15:
                regimes[i.name] = rng.choice(regimes_of(self.recurrence.spec, i.name, self.ranges[i.name]))
        choices = "other" if self.other else "", "heads" if self.heads else ""
        between = tuple(
            rng.choice(["", "shorter" if profile.ways else "", "forget", *choices]) for _ in range(calls - 1)
        )
        case = replace(
            kind, tokens=tokens, batch=1 if kind.lengths else rng.choice(profile.batches), calls=calls, between=between,
            lengths=self._lengths(tokens) if kind.lengths else (), regimes=regimes, seed=rng.randrange(2**16),
        )  # fmt: skip
        return self._aliased(case) if rng.random() < 0.45 else case

    def _longest(self, kind: Case) -> int:
        if kind.step:
            return min(12, self.profile.longest)
        if kind.form == KERNELS and is_scan(self.recurrence.spec):
            return min(self.profile.scans, self.profile.longest)
        return min(70, self.profile.longest) if kind.form == "kernel" else self.profile.longest

    def _tokens(self, longest: int) -> int:
        """A random T: the residues in turn, plus a random multiple of RESIDUES."""
        rng = self.rng
        if rng.random() < 0.15 or longest < RESIDUES:
            return rng.randint(1, longest if longest < RESIDUES else 8)
        self.residue = (self.residue + 29) % RESIDUES  # 29 and 64 are coprime, so every residue comes
        most = longest // RESIDUES if rng.random() < self.profile.far else min(2, longest // RESIDUES)
        tokens = self.residue + RESIDUES * rng.randint(0, max(0, most))
        return tokens if 0 < tokens <= longest else RESIDUES if not tokens else tokens - RESIDUES

    def _lengths(self, tokens: int) -> tuple[int, ...]:
        """Sequences that fill `tokens`, some of one token and some of none."""
        rng, left = self.rng, tokens
        found: list[int] = []
        while left:
            piece = 1 if rng.random() < 0.3 else rng.randint(1, left)
            if len(found) > 6:
                piece = left
            found.append(piece)
            left -= piece
        if self.empty:
            for _ in range(rng.choice([0, 1, 1, 2])):
                found.insert(rng.randint(0, len(found)), 0)
        rng.shuffle(found)
        return tuple(found)

    def _aliased(self, case: Case) -> Case:
        """The case with two or three inputs of one kind as the same tensor in some of its calls."""
        rng = self.rng
        kinds: dict[object, list[str]] = {}
        for i in self.inputs:
            if i.kind.time and i.name not in case.frozen:
                kinds.setdefault((i.kind, case.groups.get(i.name)), []).append(i.name)
        found = [names for names in kinds.values() if self._alike(names)]
        if not found:
            return case
        names = rng.choice(found)
        several = rng.sample(names, min(len(names), rng.choice([2, 2, 3])))
        if not self._alike(several):
            return case
        calls = range(1, case.calls + 1)
        on = rng.choice([(1, 2), (1, 2), (3, 4), (1, 3), tuple(calls)])
        overlap = rng.random() < 0.25
        return replace(case, alias=tuple(several[:2] if overlap else several), overlap=overlap,
                       alias_calls=tuple(c for c in on if c <= case.calls) or (1,))  # fmt: skip

    def _alike(self, names: list[str]) -> bool:
        """True where all inputs but real ones have the same range."""
        narrow = {self.ranges[n] for n in names if not self.ranges[n].is_real}
        return len(names) > 1 and len(narrow) <= 1


def _has_directions(recurrence: Recurrence) -> bool:
    """True where vectors are normalised, as by l2norm."""
    spec = recurrence.spec
    roots = [spec.readout, spec.system.D, *(x for s in spec.system.micro_steps for x in (s.B, *s.A.all_exprs))]
    norms = [x for x in children_first(*roots) if x.op in ("rsqrt", "sqrt")]
    return any(y.op == "sum_key" for x in norms for y in children_first(x))
