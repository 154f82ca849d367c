"""Folders as save_pretrained writes them, with tiny random models and a tokenizer of single letters."""

import convert_models as zoo
import torch

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRST .,"
TEXT = (
    "All happy families are alike, every unhappy family is unhappy in its own way. "
    "The wife had found out about the affair. Nobody knew what to do next, and the cook had left. "
)


def save(model_type, folder):
    """A random model of convert_models in a folder; the folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = zoo.build(model_type) if model_type in zoo.CONFIGS else zoo.backbone(model_type)
    model.save_pretrained(folder)
    vocabulary = {letter: place for place, letter in enumerate(LETTERS, start=3)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, []))).save_pretrained(folder)
    return folder


def by_whole_sequences(model, ids, tokens=6):
    """The likeliest tokens after ids, each from all before it, without a cache."""
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids
