"""docs/pictures/*.png, the pictures of the pages about trained models: `python docs/pictures.py [typeseg] [smollm2]`.

Each is one that `dsf analyze NAME --text docs/alice.txt --png` draws, smaller. Needs the packages of the models.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dsf.analysis.analyze import analyze
from dsf.analysis.analyze.page import Report
from dsf.analysis.models import load_model
from dsf.analysis.report.figures import png

DOCS = Path(__file__).parent
TEXT = DOCS / "alice.txt"
DPI = 100

# Model -> picture of its report -> file in docs/pictures
PICTURES = {
    "typeseg": {
        "half_lives": "mamba_half_lives",
        "eigenvalues": "mamba_eigenvalues",
        "maps": "mamba_maps",
        "map 2 S6 →": "mamba_map_forward",
        "map 2 S6 ←": "mamba_map_backward",
        "effective_state_tolerance": "mamba_effective_state",
        "tokens_decay": "mamba_tokens_decay",
    },
    "smollm2": {
        "maps": "attention_maps",
        "map 0 softmax": "attention_map_0",
        "map 11 softmax": "attention_map_11",
        "map 23 softmax": "attention_map_23",
        "distances": "attention_distances",
        "effective_state_entropy": "attention_effective_state",
        "state_bytes": "attention_state_bytes",
    },
}


def draw(name: str) -> None:
    """The pictures of one model."""
    report = Report(analyze(load_model(name), TEXT.read_text(encoding="utf-8"), TEXT.name))
    folder = DOCS / "pictures"
    folder.mkdir(exist_ok=True)
    for picture, file in PICTURES[name].items():
        png(report.figures[picture], folder / f"{file}.png", DPI)


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        draw(name)
