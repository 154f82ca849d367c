"""Trained models by name, or from a local folder that transformers saved, with their tokenizers."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsf.analysis.pretrained import PRETRAINED, Pretrained
from dsf.language.errors import DsfError, InputError

GIB = 1 << 30


def load_model(given: str) -> Pretrained:
    """The model of a name of PRETRAINED or of a local folder, in float32 and eval mode; nothing is downloaded.

    A folder holds what save_pretrained writes: config.json, weights and a tokenizer. The class is that of the saved
    model, a causal language model or an encoder. A name takes precedence over a folder of the same name: write ./name
    for the folder. Raises InputError for a given text that is neither, a folder without a config, a damaged folder,
    weights larger than the free memory, and an encoder-decoder; DsfError without transformers; NotInstalledError for a
    name whose package is missing.
    """
    if given in PRETRAINED:
        return PRETRAINED[given]()
    folder = Path(given)
    if folder.is_dir():
        return _from_folder(folder)
    if folder.exists():
        raise InputError(f"{given} is a file; expected the folder of a model (config.json, weights, tokenizer)")
    near = difflib.get_close_matches(given, PRETRAINED, n=1)
    words = f"there is no model folder {given!r}, and no model of that name: {', '.join(PRETRAINED)}"
    if near:
        raise InputError(f"{words}; did you mean {near[0]}?")
    if not HUB_ID.fullmatch(given):
        raise InputError(words)
    raise InputError(f"{words}. A model of the Hugging Face hub is saved to a folder first: {save_line(given)}")


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def save_line(given: str) -> str:
    """The commands that save a model of the hub with its tokenizer to a folder and analyse it."""
    folder = given.rpartition("/")[2]
    return (
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"M.from_pretrained('{given}').save_pretrained('{folder}'); "
        f"T.from_pretrained('{given}').save_pretrained('{folder}')\" && dsf analyze ./{folder}"
    )


def longest_context(model: nn.Module) -> int | None:
    """The number of positions that the model has for tokens, or None where nothing limits it."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():  # RoBERTa and its kin count from the place after that of padding
        if longest and name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            before = 0 if module.padding_idx is None else module.padding_idx + 1
            longest = min(longest, module.num_embeddings - before)
    return longest


def free_memory() -> float:
    """Bytes of free memory of this machine; infinity where the system does not report it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            return next(1024.0 * int(line.split()[1]) for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return _pages("SC_AVPHYS_PAGES") * _pages("SC_PAGE_SIZE")


def _pages(name: str) -> float:
    try:
        return float(os.sysconf(name))
    except (AttributeError, OSError, ValueError):  # systems without this answer
        return math.inf


def _from_folder(folder: Path) -> Pretrained:
    if not (folder / "config.json").is_file():
        if (folder / "train.json").is_file():
            raise InputError(f"{folder} holds a training run that has not ended; dsf train --resume goes on with it")
        raise InputError(f"{folder} has no config.json; expected a folder that save_pretrained has written")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise DsfError("model folders need transformers: pip install 'dsf-zoo[convert]'") from error
    ours = _ours(folder)
    config = _attempt(folder, "configuration", lambda: transformers.AutoConfig.from_pretrained(folder, **LOCAL))
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{folder}: {config.model_type} is an encoder-decoder; analyze takes decoders and encoders")
    cls = _class_of(transformers, config)
    _check_size(folder, config)
    if not any(_is_tokenizers(file.name) for file in folder.iterdir()):
        raise InputError(_without_tokenizer(folder, "has a model, but no tokenizer (tokenizer.json or the like)"))
    tokenizer = _attempt(folder, "tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(folder, **LOCAL))
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise InputError(_without_tokenizer(folder, "has a tokenizer without a vocabulary"))
    if ours == "swapped":
        from dsf.models import load_swapped

        loading: Any = {}
        model = _attempt(folder, "model", lambda: load_swapped(folder))
    else:
        model, loading = _attempt(
            folder,
            "model",
            lambda: cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **LOCAL),
        )
    about = f"{type(model).__name__} from the folder {folder.resolve().name}"
    missing = sorted(loading.get("missing_keys", ()))
    if missing:
        about += f"; {len(missing)} weights are not in its files and therefore random, {missing[0]} first"

    def tokenize(text: str) -> list[int]:
        if not tokenizer(text, add_special_tokens=False).input_ids:
            return []  # [CLS][SEP] around nothing is no text
        return list(tokenizer(text).input_ids)

    return Pretrained(folder.resolve().name, model.eval(), tokenize, about, lambda token: tokenizer.decode([token]))


def _ours(folder: Path) -> str | None:
    """The kind of dsf model in a folder: "model" (its classes are then registered with transformers), "swapped", or
    None.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if config.get("model_type") == "dsf":
        importlib.import_module("dsf.mixers.models.hf")
        return "model"
    return "swapped" if config.get("dsf_swap") else None


TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")


def _is_tokenizers(name: str) -> bool:
    return name.startswith(TOKENIZER_FILES) or name.endswith((".tiktoken", ".model"))


def _without_tokenizer(folder: Path, what: str) -> str:
    return (
        f"{folder} {what}, so a text cannot become its tokens; save the one it was trained with beside it: "
        f"AutoTokenizer.from_pretrained(WHERE_THE_MODEL_CAME_FROM).save_pretrained('{folder}'), from transformers"
    )


LOCAL = {"local_files_only": True, "trust_remote_code": False}


def _class_of(transformers: Any, config: Any) -> Any:
    """The class that was saved; if it is unknown, the causal model of its type, else the base model."""
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or []]
    if named and named[0] is not None:
        return named[0]
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModel


def _check_size(folder: Path, config: Any) -> None:
    """Raise InputError for weights that do not fit in the free memory as float32."""
    stored = sum(f.stat().st_size for kind in ("*.safetensors", "*.bin") for f in folder.glob(kind))
    dtype = getattr(config, "dtype", None)
    need, free = stored * 4 / (dtype.itemsize if isinstance(dtype, torch.dtype) else 4), free_memory()
    if need > free:
        raise InputError(f"{folder}: its weights take {need / GIB:.1f} GiB in float32, but {free / GIB:.1f} are free")


def _attempt(folder: Path, what: str, load: Any) -> Any:
    """The result of load(). Raises InputError for whatever exception transformers raises in it."""
    try:
        return load()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[0] if lines else type(error).__name__
        raise InputError(f"{folder}: its {what} cannot be loaded: {why}") from error
