"""The entry point of the `dsf` command; the commands themselves are in _cli_app."""

from __future__ import annotations

import importlib
import os
import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run `dsf`. Without typer or rich, one line says what to install and the exit code is 2."""
    try:
        for name in NEEDED:
            importlib.import_module(name)
    except ImportError:
        print("the dsf command needs typer and rich: pip install 'dsf-zoo[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    if sys.stdout is None:  # closed by the shell: dsf zoo >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the end)
    from dsf.analysis._cli_app import app

    app()


if __name__ == "__main__":
    main()
