"""python -m dsf.fuzz: random declarations on random calls, against the float64 oracle (docs/numerics.md)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from dsf.fuzz.loop import run
from dsf.fuzz.report import stderr
from dsf.language.errors import DsfError, InputError


def _check_out(out: Path | None) -> None:
    """Raise InputError, before any work, for a record that cannot be written."""
    if out is None:
        return
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--out {out}: cannot write a file there")


def main(arguments: list[str] | None = None) -> int:
    """Run the adversary. Returns 0 if nothing failed, 1 if something did, 2 for wrong input."""
    parser = argparse.ArgumentParser("python -m dsf.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="budget, without what making failures small takes")
    parser.add_argument("--cases", type=int, help="budget in cases; 300 where neither is given")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backend", choices=("torch", "triton"), help="triton on a GPU, else torch, unless named")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with declarations of its own")
    parser.add_argument("--each", type=int, help="cases of one declaration (GPU 24, else 8)")
    parser.add_argument("--share", type=float, help="most seconds that one declaration takes")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for making one failure small; 0 for none")
    parser.add_argument("--no-poison", action="store_true", help="leave unwritten memory as it is")
    parser.add_argument("--out", type=Path, help="write the record as JSON")
    given = parser.parse_args(arguments)
    cases = 300 if given.cases is None and given.seconds is None else given.cases
    try:
        _check_out(given.out)
        result = run(
            given.seconds, cases, seed=given.seed, device=given.device, backend=given.backend, workers=given.workers,
            each=given.each, share=given.share, shrink=given.shrink, poison=not given.no_poison, told=stderr,
        )  # fmt: skip
    except DsfError as error:
        stderr(f"dsf.fuzz: {' '.join(str(error).split()).removeprefix('dsf.fuzz: ')}")
        return 2
    print(result)
    try:
        if given.out is not None:
            given.out.write_text(json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        stderr(f"dsf.fuzz: --out {given.out}: cannot be written ({error.strerror})")
        return 2
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
