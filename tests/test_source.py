"""Where printed source lies: private, whole, and never run from a file that somebody else could have written."""

import os
import stat
import sys
import time
from pathlib import Path

import pytest

from dsf.language.errors import DsfError
from dsf.triton import source
from dsf.triton.source import Source, cache_directory, write

TEXT = "value = 1\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without anything in it."""
    for name in ("DSF_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    source._own_directory.cache_clear()
    yield tmp_path
    source._own_directory.cache_clear()


def printed(text=TEXT):
    return Source("printed", text, ())


def test_the_folder_is_of_the_environment_then_of_xdg_then_of_home(home, monkeypatch):
    assert cache_directory() == home / ".cache" / "dsf"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert cache_directory() == home / "xdg" / "dsf"
    monkeypatch.setenv("DSF_CACHE_DIR", str(home / "own"))
    assert cache_directory() == home / "own" and write(printed()).parent == home / "own"


@pytest.mark.parametrize("blocked", ["a file", "nowhere"])
def test_an_unwritable_home_is_replaced_by_a_private_folder(home, monkeypatch, blocked):
    if blocked == "a file":
        (home / ".cache").write_text("")
    else:
        monkeypatch.setenv("HOME", "/proc/nobody")
    path = write(printed())
    assert path.read_text() == TEXT and home not in path.parents
    found = path.parent.stat()
    assert stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.getuid()
    assert write(printed()) == path  # one folder a process


def test_a_folder_that_others_can_write_is_not_used(home):
    shared = home / ".cache" / "dsf"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert shared not in write(printed()).parents


def test_a_chosen_folder_that_cannot_be_written_is_refused_in_words(home, monkeypatch):
    (home / "taken").write_text("")
    monkeypatch.setenv("DSF_CACHE_DIR", str(home / "taken"))
    with pytest.raises(DsfError, match=r"DSF_CACHE_DIR=.*taken cannot hold the source that is printed: "):
        write(printed())


@pytest.mark.parametrize("harm", ["corrupt", "binary", "link", "writable"])
def test_what_is_not_exactly_the_source_is_written_anew(home, harm):
    path = write(printed())
    if harm == "corrupt":
        path.write_text("value = 2\n")
    elif harm == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif harm == "link":
        (home / "elsewhere").write_text(TEXT)
        path.unlink()
        path.symlink_to(home / "elsewhere")
    else:
        path.chmod(0o666)
    assert write(printed()) == path
    assert path.read_text() == TEXT and not path.is_symlink()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600


def test_a_module_is_what_was_printed_whatever_lies_in_the_file(home, monkeypatch):
    made = printed("value = 3\n\n\ndef f():\n    return 4\n")
    real = source.write

    def written_over(x):
        path = real(x)
        path.write_text("value = 'foreign'\n\n\ndef f():\n    return 'foreign'\n")
        return path

    monkeypatch.setattr(source, "write", written_over)
    try:
        import inspect

        module = made.module()
        assert module.value == 3 and module.f() == 4
        assert inspect.getsource(module.f) == "def f():\n    return 4\n"  # what Triton compiles
    finally:
        sys.modules.pop(f"dsf_generated_{made.digest}", None)


def test_half_written_files_that_were_left_are_removed(home):
    folder = cache_directory()
    left, under_way = folder / "printed_x.tmp", folder / "printed_y.tmp"
    for path in (left, under_way):
        path.write_text("")
    old = time.time() - 2 * source.STALE
    os.utime(left, (old, old))
    write(printed())
    assert not left.exists() and under_way.exists()


def test_a_write_that_fails_leaves_nothing_behind(home, monkeypatch):
    def fails(*_):
        raise OSError("disk full")

    folder, replace = cache_directory(), os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: fails() if folder in Path(b).parents else replace(a, b))
    path = write(printed())
    assert path.parent != folder and path.read_text() == TEXT
    assert not list(folder.iterdir())
