# ruff: noqa: E501 (lines of a Markdown table)
"""docs/transformer-lens.md from benchmarks/results/lens.json: the page says what was measured and read, nothing else.

python benchmarks/lens_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lens.json"
PAGE = ROOT / "docs" / "transformer-lens.md"

TEXT = """# Beside transformer-lens

transformer-lens is the best-known way to look inside transformers, and its version 4.3 looks into recurrent layers too. This page
says which of this library's measures transformer-lens has for kinds of layers, and how far its pictures are from the exact kernel
matrix Phi (y = Phi · u, [forms](forms.md#the-matrix)) where both can be computed. Its main purpose, hooks on every activation and
interventions on them, has no table here, since this library does not do that.

Measured by `python benchmarks/lens.py` with {versions}, on the tiny random models of `tests/convert_models.py`, first layer,
{tokens} tokens, float32; the page is made from `benchmarks/results/lens.json` and a test holds the two together. Errors are
‖theirs - exact‖ / ‖exact‖ (Frobenius), where *exact* is `measures.kernel_matrix` of the model that `dsf.convert` converted.

| layer | its view of Phi | error of its view | `dsf` |
|---|---|---:|---|
| softmax attention (Llama) | `hook_pattern` | {llama:.0e} | exact |
| Mamba | `compute_effective_attention` after `eager_scan = True` | {mamba:.0e} | exact |
| Mamba-2 | `compute_effective_attention` after `eager_scan = True` | {mamba2:.0e} | exact |
| Gated DeltaNet (Qwen3-Next) | `compute_effective_attention`, "an interpretability heuristic" in its own words | {qwen:.2f} | exact: Phi · v is the layer's output to {exact:.0e} |
| KDA (Kimi Linear) | none: {kimi} | - | exact |
| RG-LRU (RecurrentGemma) | none: {gemma} hooks, around the block | - | exact |

* Gated DeltaNet: the view leaves out what the delta rule erases, the normalisation of q and k, and the factor 1/√N. Its
  picture applied to v differs from the layer's output by {output:.2f} of the output. If q and k are normalised and scaled by hand, the
  picture is still off by {normalised:.2f} here: that is the erasure alone. transformer-lens' `compute_ssm_state` runs the whole rule, so
  its states are right although its picture is not.
* Mamba, Mamba-2: after a plain `run_with_cache` the view raises "{refusal}" with the version of transformers named above. With
  `eager_scan = True` on the layer it is exact, if `include_dt_scaling=True` is given and D is added on the diagonal.
  The default picture has neither.

| measure | softmax | Mamba | Mamba-2 | Gated DeltaNet | KDA | `dsf` |
|---|---|---|---|---|---|---|
| states along the sequence | - (KV cache) | yes | yes | yes | no | all finite systems: `trajectory.states()` |
| decay, write, erase of a token | - | hooks | hooks | hooks | no | all finite systems: `gate_strengths` |
| Phi | yes | yes | yes | approximate | no | all: `kernel_matrix` |
| eigenvalues of A_t | no | no | no | no | no | all: `eigenvalues`, `paper=True` for the framework paper's form |
| half-life, horizon, Lyapunov exponents | no | no | no | no | no | all finite systems: `half_life`, `horizon`, `lyapunov_exponents` |
| effective state size | no | no | no | no | no | all: `effective_state_size` |
| transition and propagator norms, cumulative decay | no | no | no | no | no | all finite systems: `transition_norm`, `propagator_norm`, `cumulative_decay` |
| state size and cost against context | no | no | no | no | no | all: `state_size`, `costs` |
| steering an activation in the middle of a run | yes | yes | yes | yes | no | no |

The "no" for eigenvalues, half-lives, exponents and effective state sizes is the result of a search for these words in the source of
transformer-lens: it has eigenvalues only of products of weight matrices (`FactoredMatrix`), and the others nowhere.
"""


def page(data: dict[str, Any]) -> str:
    """The page as Markdown, from the JSON that benchmarks/lens.py writes."""
    found = data["found"]
    qwen = found["qwen3_next"]
    return TEXT.format(
        versions=", ".join(f"{name} {version}" for name, version in data["versions"].items()),
        tokens=data["tokens"],
        llama=found["llama"]["phi"],
        mamba=found["mamba"]["eager"],
        mamba2=found["mamba2"]["eager"],
        qwen=qwen["phi"],
        exact=qwen["exact_output"],
        output=qwen["output"],
        normalised=qwen["phi_normalised"],
        kimi=found["kimi_linear"]["words"],
        gemma=len(found["recurrent_gemma"]["hooks"]),
        refusal=found["mamba"]["plain_refuses"],
    )


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
