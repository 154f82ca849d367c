"""ptxas: an older release than SOUND is replaced by a later one of the same Triton, or what it makes is held."""

import importlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import dsf
from dsf.kernels.triton import assembler, launch, launcher, operators
from dsf.kernels.triton.chunk import matrix
from dsf.triton.choose import elsewhere

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


FAULTY = """
        /*0010*/                   UMOV UR20, 0x4000 ;
        /*0020*/                   UIADD3 UR34, UP0, UR34, 0x40, URZ ;
        /*0030*/                   UIADD3.X UR35, UR35, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R56, R84, gdesc[UR32].tnspB, R56 ;
"""


def tools(**releases):
    """triton.knobs with assemblers of these releases."""
    found = {name: SimpleNamespace(path=f"/{name}", version=release) for name, release in releases.items()}
    return SimpleNamespace(nvidia=SimpleNamespace(**found))


@pytest.mark.parametrize(
    ("own", "other", "chosen"), [("12.8", "12.9", "other"), ("12.9", "12.8", "own"), ("13.0", None, "own")]
)
def test_a_sound_assembler_is_taken_and_triton_asks_for_its_release_again(monkeypatch, own, other, chosen):
    forgotten = []
    made = tools(ptxas=own) if other is None else tools(ptxas=own, ptxas_blackwell=other)
    monkeypatch.setattr(assembler.triton, "knobs", made)
    monkeypatch.setattr(assembler, "_forget_release", lambda: forgotten.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assembler.choose_assembler()
    assert (made.nvidia.ptxas == "/ptxas_blackwell") == (chosen == "other") == bool(forgotten)


@pytest.mark.parametrize("made", [tools(ptxas="12.8"), tools(ptxas="12.8", ptxas_blackwell="12.8")])
def test_where_there_is_none_kernels_are_held(monkeypatch, made):
    """A kernel of a Hopper GPU that reads what nobody wrote is refused, with the remedy; others are read once."""
    monkeypatch.setattr(assembler.triton, "knobs", made)
    assembler.choose_assembler()
    assert not assembler.is_sound() and made.nvidia.ptxas.path == "/ptxas"
    texts, read = {b"wrong": FAULTY, b"right": "/*0010*/ UMOV UR20, 0x4000 ;"}, []
    monkeypatch.setattr(assembler, "disassembled", lambda cubin: read.append(cubin) or texts[cubin])
    monkeypatch.setattr(assembler, "_right", set())

    def kernel(code, arch=90):
        about = SimpleNamespace(name="walk", target=SimpleNamespace(arch=arch))
        return SimpleNamespace(metadata=about, hash=code, asm={"cubin": code})

    for given in (kernel(b"right"), kernel(b"right"), kernel(b"wrong", 80), None):
        assembler.hold(given)
    assert read == [b"right"]
    with pytest.raises(RuntimeError, match=r"ptxas 12\.8 .* kernel walk wrongly.*TRITON_PTXAS_PATH"):
        assembler.hold(kernel(b"wrong"))


def test_a_triton_without_the_other_assembler_keeps_its_own(monkeypatch):
    class Tools:
        ptxas = SimpleNamespace(path="/ptxas", version="12.8")

        @property
        def ptxas_blackwell(self):
            raise RuntimeError("Cannot find ptxas-blackwell")

    monkeypatch.setattr(assembler.triton, "knobs", SimpleNamespace(nvidia=Tools()))
    assembler.choose_assembler()
    assert assembler.chosen().path == "/ptxas" and not assembler.is_sound()
    monkeypatch.setattr(assembler.triton, "knobs", SimpleNamespace())
    assembler.choose_assembler()
    assert assembler.chosen() is None and assembler.is_sound()


@pytest.mark.parametrize(("sound", "capturing"), [(False, False), (False, True), (True, False)])
def test_every_launch_is_held_that_is_made_ready_outside_of_a_graph(monkeypatch, sound, capturing):
    """Also those of a known schedule in other sizes, for which only the launch is made anew."""
    kernel, seen = launcher._probe, []
    if not isinstance(kernel, launch.JITFunction):
        pytest.skip("needs a process that does not interpret kernels")
    monkeypatch.setattr(launch, "is_sound", lambda: sound)
    monkeypatch.setattr(launch, "_compiled", lambda x: x)
    monkeypatch.setattr(launch, "hold", seen.append)
    monkeypatch.setattr(launch, "proven", lambda: False)
    given = SimpleNamespace(kernel=kernel, named={})
    launch.runner(given, capturing=capturing)
    assert seen == ([] if sound or capturing else [given])


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_reads_of_registers_that_nobody_wrote_are_found():
    found = assembler.unwritten
    assert found(FAULTY) == ["UIADD3 UR34, UP0, UR34, 0x40, URZ", "UIADD3.X UR35, UR35, -0x7fffffe0, URZ, UP0, !UPT"]
    assert not found(FAULTY.replace(", UR34, 0x40", ", UR20, 0x40").replace("UR35, -", "URZ, -"))
    assert found("/*0040*/ HGMMA.64x32x16.F32.BF16 R56, R84, gdesc[UR32].tnspB, R56 ;")
    wide = "/*0010*/ UMOV UR52, 0x1 ;\n/*0020*/ UMOV UR61, 0x2 ;\n/*0030*/ UIMAD.WIDE.U32 UR36, UP1, UR52, UR61, UR36 ;"
    assert found(wide) == ["UIMAD.WIDE.U32 UR36, UP1, UR52, UR61, UR36"]
    both = "/*0000*/ UIMAD.WIDE.U32 UR36, UR4, UR4, URZ ;\n"
    assert found(both + wide) == ["UIMAD.WIDE.U32 UR36, UR4, UR4, URZ"]  # the pair is there, and UR62 is not read
    assert found("/*0040*/ UISETP.NE.AND UP0, UPT, UR7, 0x1, UPT ;\n/*0050*/ UMOV UR8, UR7 ;") == [
        "UISETP.NE.AND UP0, UPT, UR7, 0x1, UPT", "UMOV UR8, UR7",
    ]  # fmt: skip


def test_gradients_of_shared_heads_read_no_register_that_nobody_wrote(monkeypatch, benchmarks):
    """ptxas 12.8 made such code of this kernel, at these sizes: gradients of queries were wrong on an H100."""
    if assembler.triton.knobs.runtime.interpret:
        pytest.skip("needs a process that does not interpret kernels")
    front_end = benchmarks("front_end").FrontEnd()
    monkeypatch.setattr(matrix, "limits", lambda device: (232_448, 132))
    monkeypatch.setattr(matrix, "sharing", lambda *_: 2)
    shapes = {"q": (1, 131, 2, 24), "k": (1, 131, 2, 24), "v": (1, 131, 4, 40)}
    x = {n: torch.empty(s, dtype=torch.bfloat16, device="meta").requires_grad_() for n, s in shapes.items()}
    x["slope"] = torch.empty(4, device="meta").requires_grad_()
    operators.forget()
    with operators.noted() as schedules, elsewhere():
        y = dsf.mixers.get("retnet").recurrence(**x, backend="triton")
        torch.autograd.grad(y, list(x.values()), torch.empty_like(y))
    operators.forget()
    launches = [x for schedule in schedules for x in schedule.launches if x.kernel.fn.__name__ == "shared_gradient"]
    assert len(launches) == 1
    kernel = front_end.compiled(front_end.of(launches[0]))
    text = assembler.disassembled(kernel.asm["cubin"])
    assert "HGMMA" in text and not assembler.unwritten(text)
