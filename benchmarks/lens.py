"""What transformer-lens shows of a mixer against the exact Phi, on random models: writes benchmarks/results/lens.json.

In an environment of its own (it pins much), with this package importable and torch the CPU build:

    pip install torch 'transformers==5.17.*' 'transformer-lens==4.3.*' .
    python benchmarks/lens.py

The models are those of tests/convert_models.py, whose decays are slow enough for a wrong transition to show.
`python benchmarks/lens_page.py` then writes docs/transformer-lens.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

import dsf
from dsf.analysis import measures, record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import convert_models  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lens.json"
TOKENS = 48
QWEN_KEYS = convert_models.CONFIGS["qwen3_next"]["linear_key_head_dim"]
KINDS = ("mamba", "mamba2", "qwen3_next", "kimi_linear", "recurrent_gemma", "llama")


def bridge(model: Any) -> Any:
    """transformer-lens's wrapper of a model that is in memory; it wants a folder and a tokenizer, used or not."""
    words = {str(i): i for i in range(64)}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, device="cpu", hf_model=model, tokenizer=tokenizer)


def exact(kind: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(Phi [H, T, T, p], y [T, H, P]) of the first mixer."""
    model = convert_models.build(kind)
    converted = dsf.convert(model)
    with record(converted) as recording:
        model(ids)
    trajectory = recording.trajectory(recording.layers[0])
    return measures.kernel_matrix(trajectory)[0], measures.output(trajectory)[0]


def far(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


def seen(kind: str, ids: Tensor) -> dict[str, Any]:
    """Errors of what the bridge shows of the first layer, or the words it refuses with."""
    try:
        lens = bridge(convert_models.build(kind))
        block = lens.blocks[0]
        mixer = getattr(block, "linear_attn", None) or getattr(block, "mixer", None)
        _, cache = lens.run_with_cache(ids, use_cache=False)
        phi, y = exact(kind, ids)
        if kind == "recurrent_gemma":
            return {"view": None, "hooks": [name for name in cache if name.startswith("blocks.0.")]}
        if "blocks.0.attn.hook_pattern" in cache:
            return {"view": "hook_pattern", "phi": far(cache["blocks.0.attn.hook_pattern"][0], phi.squeeze(-1))}
        if kind == "qwen3_next":
            shown = mixer.compute_effective_attention(cache, 0)[0]
            drawn = cache["blocks.0.linear_attn.hook_recurrence_out"][0]
            plain = {name: x for name, x in cache.items()}
            for name, scale in (("hook_q", phi.new_tensor(QWEN_KEYS).rsqrt()), ("hook_k", 1.0)):
                name = f"blocks.0.linear_attn.{name}"
                plain[name] = torch.nn.functional.normalize(plain[name], dim=-1) * scale
            normalised = mixer.compute_effective_attention(plain, 0)[0]
            values = cache["blocks.0.linear_attn.hook_v"][0].transpose(0, 1)  # [H, T, P]
            return {
                "view": "compute_effective_attention",
                "phi": far(shown, phi.squeeze(-1)),
                "phi_normalised": far(normalised, phi.squeeze(-1)),
                "output": far((shown @ values).transpose(0, 1), drawn),
                "exact_output": far(y, drawn),
            }
        return {"view": "compute_effective_attention", **scans(mixer, lens, ids, cache, phi)}
    except (RuntimeError, ValueError, AttributeError) as error:
        return {"refuses": type(error).__name__, "words": words(error)}


def scans(mixer: Any, lens: Any, ids: Tensor, cache: Any, phi: Tensor) -> dict[str, Any]:
    """Mamba and Mamba-2: their view, from the plain run and from the eager one; D is added on its diagonal."""
    out = {}
    for name in ("plain", "eager"):
        try:
            if name == "eager":
                mixer.eager_scan = True
                _, cache = lens.run_with_cache(ids, use_cache=False)
            shown = mixer.compute_effective_attention(cache, 0, include_dt_scaling=True)[0]  # [H or channels, T, T]
            skip = torch.diag_embed(mixer.original_component.D[:, None].expand(-1, len(ids[0])))
            whole = (phi[0].movedim(-1, 0) if phi.shape[-1] > 1 else phi.squeeze(-1)).expand_as(shown)
            out[name] = far(shown + skip, whole)
        except RuntimeError as error:
            out[f"{name}_refuses"] = words(error)
    return out


def words(error: Exception) -> str:
    """The first sentence of what went wrong."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")


def main() -> None:
    torch.set_num_threads(1)
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = {kind: seen(kind, ids) for kind in KINDS}
    names = ("transformer-lens", "transformers", "torch", "dsf-zoo")
    data = {"versions": {name: version(name) for name in names}, "tokens": TOKENS, "found": found}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
