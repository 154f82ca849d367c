"""Everything that is timed on a CUDA GPU, ours and every peer present, in one command; then the tables made of it.

python benchmarks/gpu.py [--only decode scan]

Runs gpu_matrix.py (forward, forward+backward, peak memory, first calls), gpu_decode.py, gpu_scan.py and
gpu_accuracy.py one after the other; writes benchmarks/results/ and the tables of docs/performance.md. A script that
fails stops none of the others; the exit status says so at the end.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = {"matrix": ["--compile"], "decode": [], "scan": ["--peers"], "accuracy": []}


def measure(name):
    """Run one script and put its table into the page; True where both went well."""
    script, record = HERE / f"gpu_{name}.py", HERE / "results" / f"gpu_{name}.json"
    shown = ["--page", record, "--into", HERE.parent / "docs" / "performance.md"]
    steps = ([*SCRIPTS[name], "--json", record], shown)
    return all(subprocess.run([sys.executable, script, *map(str, step)]).returncode == 0 for step in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, default=list(SCRIPTS))
    failed = [name for name in parser.parse_args().only if not measure(name)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
