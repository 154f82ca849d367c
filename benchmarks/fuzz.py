"""The adversary on this machine's GPU (or CPU), in as many processes as it has cores, recorded.

python benchmarks/fuzz.py --seconds 420 --seed 0 --out benchmarks/results/fuzz.json
python benchmarks/fuzz.py --seconds 420 --seed 1 --out benchmarks/results/fuzz.json --add

--add puts a run of another seed into the record that is there (one commit, one kind of machine). The record is written
as the run goes, so that one that is cut off leaves what it had. The exit status is 1 where something failed, or where a
record of a GPU has fewer cases than WANTED says.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from dsf.fuzz import combined, run
from dsf.fuzz.report import QUOTAS, stderr

# what one record of a GPU is to hold
WANTED = {"cases": 3000, "declarations": 150, QUOTAS[0]: 300, QUOTAS[1]: 300}


def lacking(record):
    """What a record has too little of, in words."""
    had = {"cases": record["cases"], "declarations": record["declarations"], **record["counts"]}
    return [f"{name}: {had[name]} of {wanted}" for name, wanted in WANTED.items() if had[name] < wanted]


def main():
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--each", type=int, default=24, help="cases of one declaration")
    parser.add_argument("--share", type=float, default=40.0, help="most seconds of one declaration")
    parser.add_argument("--shrink", type=float, default=45.0, help="seconds for making one failure small")
    parser.add_argument("--commit", help="of the tree that runs, where git does not know it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--add", action="store_true", help="to the record that is there")
    given = parser.parse_args()
    before = [json.loads(given.out.read_text())] if given.add and given.out.exists() else []

    def write(result):
        record = result.to_dict() | ({"commit": given.commit} if given.commit else {})
        record = combined([*before, record]) if before else record
        given.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        return record

    result = run(
        given.seconds, given.cases, seed=given.seed, device=given.device, workers=given.workers, each=given.each,
        share=given.share, shrink=given.shrink, told=stderr, kept=write,
    )  # fmt: skip
    print(result)
    record = write(result)
    short = lacking(record) if given.device.startswith("cuda") else []
    for line in short:
        stderr(f"too few {line}")
    sys.exit(1 if short or record["failures"] else 0)


if __name__ == "__main__":
    main()
