"""The checkpoints of a training run: which are complete, whether they fit the run, what is kept when a run stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsf.analysis.ranks import STATE
from dsf.language.errors import InputError

RECORD, WHOLE = "train.json", "whole"  # WHOLE: the file written last into a checkpoint
NEEDED = "scheduler.pt", "trainer_state.json", f"{STATE}/.metadata"


def last_checkpoint(out: Path, identity: dict[str, Any], resume: bool) -> Path | None:
    """The last complete checkpoint in a run's folder, or None to begin anew.

    identity: of the new run (`Identity`, as plain data). resume: whether the user asks to go on. Raises InputError for
    a folder that holds something else, another run, or a damaged checkpoint.
    """
    record = out / RECORD
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out} is a file; expected a folder")
        if not record.is_file():
            if resume:
                raise InputError(f"--resume: {out} holds no training run ({RECORD} is not there)")
            if out.exists() and any(out.iterdir()):
                raise InputError(f"--out {out} is not empty and holds no training run; give another folder")
            return None
    except OSError as error:
        raise InputError(f"--out {out} cannot be opened: {error.strerror}") from error
    if not resume:
        raise InputError(f"{out} holds a training run; --resume goes on with it, or give another --out")
    try:
        before = dict(json.loads(record.read_text(encoding="utf-8"))["identity"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{record} cannot be read as the record of a run: {error}") from error
    old_files, files = before.get("sources", {}), identity.get("sources", {})
    changed = [f for f in {**files, **old_files} if old_files.get(f) != files.get(f)]
    if changed and before.get("model") == identity.get("model"):
        raise InputError(f"--resume: {changed[0]} has changed since the run in {out} began; give another --out")
    for field, value in identity.items():
        if before.get(field) != value and (field != "encoding" or field in before):  # earlier runs do not say theirs
            old, new = _difference(before.get(field), value)
            raise InputError(
                f"--resume: the run in {out} has another {field}{old}, and not{new}; its checkpoint does not fit"
            )
    last = _last_whole(out)
    if last is not None and not (last / STATE).is_dir():
        raise InputError(f"--resume: {last} is of an earlier dsf, whose checkpoints are not read; give another --out")
    lost = [] if last is None else [f for f in NEEDED if not (last / f).is_file()]
    if lost:
        raise unreadable(last, f"{lost[0]} is not there")
    return last


def _last_whole(out: Path) -> Path | None:
    whole = [p for p in (out / "checkpoints").glob("checkpoint-*") if (p / WHOLE).is_file()]
    return max(whole, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def unreadable(checkpoint: Any, why: str) -> InputError:
    """The error for a checkpoint that is damaged."""
    return InputError(f"--resume: {checkpoint} cannot be read ({why}); without that folder, an earlier one is taken")


def kept(out: Path) -> str:
    """What is kept of a run that stopped early, in words."""
    last = _last_whole(out)
    if last is not None:
        return f"the checkpoint of step {last.name.rpartition('-')[2]} is kept, --resume goes on from it"
    return "there is no checkpoint yet, --resume begins again" if (out / RECORD).is_file() else "nothing was written"


def _difference(before: Any, now: Any) -> tuple[str, str]:
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(k for k in now if before.get(k) != now[k])
        return f" ({key} = {before.get(key)})", f" {key} = {now[key]}"
    return ("", " this one") if isinstance(now, str) and len(now) == 64 else (f" ({before})", f" {now}")
