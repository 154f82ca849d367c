"""Hugging Face: `DsfConfig` and `DsfForCausalLM`, known to AutoConfig and AutoModelForCausalLM once this is imported.

With `hf_cache`, all that imports transformers (5.6.0, 5.23.0, 5.24.0 were tried); what others rename is mended here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from dsf import Packing
from dsf.language.errors import InputError
from dsf.mixers import Mixer
from dsf.mixers._beside import lay_all, product_of
from dsf.mixers._own import Owner
from dsf.mixers.models.causal_lm import Backbone, CausalLM, reset_mixer, reset_mlp
from dsf.mixers.models.config import ATTENTION, ModelConfig
from dsf.mixers.models.hf_cache import DsfCache, state_layer, states_of
from dsf.mixers.models.names import USUAL, WORKED_OUT, agree, ours
from dsf.mixers.models.naming import beside, constructor_of, takes
from dsf.mixers.models.padding import Unpadded, predicted, unpadded
from dsf.mixers.models.parts import RMSNorm, SwiGLU, check_labels, check_range, cross_entropy, linear_cross_entropy
from dsf.mixers.models.saving import save_over
from dsf.mixers.models.spread import padding_of, refuse_decoding, targets_of
from dsf.mixers.models.weights import as_built, but_loaded, copy_weights, head_apart, reads_weight, undecayed_names

FIELDS = tuple(ModelConfig.model_fields)
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # before 5.24
FOLLOWING = (*WORKED_OUT, "layer_types", "layer_heads")  # in files for other readers, and to be checked


class DsfConfig(PreTrainedConfig):
    """`ModelConfig` for transformers. Its fields also have transformers' usual names (hidden_size, ...).

    num_attention_heads is n_heads, and intermediate_size is mlp_hidden; where these are None, they are what follows
    from the other fields. Raises InputError for values that do not fit, for two names of one field with different
    values, and for fields of other models' configurations that a model here lacks. Other names are kept, as by
    transformers.
    """

    model_type = "dsf"
    keys_to_ignore_at_inference = [CACHE]
    attribute_map = USUAL

    def __init__(self, **fields: Any) -> None:
        own, rest = ours(fields, FIELDS)
        # transformers makes a configuration without arguments to see its defaults
        model = ModelConfig(**{**DEFAULTS, **own})
        for name, value in model.model_dump().items():
            setattr(self, name, value)
        agree("layer_types", rest.pop("layer_types", None), self.layer_types, "mixers")
        agree("layer_heads", rest.pop("layer_heads", None), self.layer_heads, "n_heads, mixer_options and d_model")
        if model.n_heads is None and ATTENTION not in model.mixers:  # of layers that are not there
            rest.pop("num_attention_heads", None)
        for usual, name in WORKED_OUT.items():
            agree(usual, rest.pop(usual, None), getattr(self, usual), f"{name} = {getattr(self, name)} and d_model")
        self.use_cache = rest.pop("use_cache", True)
        rest["tie_word_embeddings"] = model.tie_embeddings
        super().__init__(**rest)

    @property
    def layer_types(self) -> list[str]:
        """For each layer "full_attention" or "linear_attention", as transformers checks these names. Caches do not
        depend on them."""
        return ["full_attention" if m == ATTENTION else "linear_attention" for m in self.model_config.layer_mixers]

    @property
    def layer_heads(self) -> list[int | None]:
        """The number of heads of every layer, None where its mixer has none."""
        config = self.model_config
        return [config.heads(m) if takes(constructor_of(m), "n_heads") else None for m in config.layer_mixers]

    @property
    def num_attention_heads(self) -> int:
        """Heads of softmax attention. Setting it sets n_heads."""
        return self.model_config.heads(ATTENTION)

    @num_attention_heads.setter
    def num_attention_heads(self, value: int) -> None:
        self.n_heads = value

    @property
    def intermediate_size(self) -> int:
        """Channels of the MLPs. Setting it sets mlp_hidden."""
        return self.model_config.hidden

    @intermediate_size.setter
    def intermediate_size(self, value: int) -> None:
        self.mlp_hidden = value

    def to_dict(self) -> dict[str, Any]:
        """All fields, also those that follow from others, for other programs that read config.json."""
        return {**super().to_dict(), **{name: getattr(self, name) for name in FOLLOWING}}

    @property
    def model_config(self) -> ModelConfig:
        """The `ModelConfig`. Raises InputError if a field was set to a value that does not fit."""
        return ModelConfig(**{name: getattr(self, name) for name in FIELDS})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """The fields in a folder's config.json. A mixer's file is taken from this folder if it is there."""
        fields, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return beside(fields, pretrained_model_name_or_path), rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A configuration from its fields."""
        return super().from_dict(beside(config_dict, kwargs.get("name_or_path")), **kwargs)

    @classmethod
    def of(cls, config: ModelConfig, **fields: Any) -> DsfConfig:
        """The DsfConfig of a torch-only model's `ModelConfig`. fields: transformers' other fields."""
        return cls(**{**config.model_dump(), **fields})


DEFAULTS: dict[str, Any] = {"vocab_size": 32000, "d_model": 128, "n_layers": 4, "mixers": ["gated_deltanet"]}


class DsfPreTrainedModel(PreTrainedModel):
    """The attributes that transformers reads of all dsf models."""

    config_class = DsfConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _is_stateful = True  # a rejected draft cannot be taken back out of a state
    _supports_sdpa = True  # softmax layers use torch's fused attention
    _skip_keys_device_placement = [CACHE]
    # decay rates and their kin: rounded to bfloat16, memories of thousands of tokens all become one length
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "D", "Lambda"]
    _built = False  # afterwards, what is inside a mixer may be memory that nobody has written

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(config, ModelConfig):
            name = type(self).__name__
            raise InputError(f"{name} takes a DsfConfig, got ModelConfig; DsfConfig.of(config) makes one of it")
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers'. It then moves weights that decode steps multiply together into one memory again."""
        found = super().from_pretrained(*args, **kwargs)
        lay_all(found[0] if isinstance(found, tuple) else found)
        return found

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As transformers'. A save over an earlier one replaces files once all new ones are written. Raises InputError
        for weights of which each rank has a part."""
        save_over(super().save_pretrained, self, lambda weights: head_apart(self, weights), *args, **kwargs)

    def post_init(self) -> None:
        """transformers' `post_init`, the last line of constructors."""
        super().post_init()
        self._built = True

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise every module that is not initialised yet. transformers' own method leaves out modules without
        weights of their own, and here such modules initialise those inside them."""
        for module in self.modules():
            if not getattr(module, "_is_hf_initialized", False):
                self._init_weights(module)
                module._is_hf_initialized = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a mixer and all modules inside it as in its paper. Loaded weights stay."""
        config = self.config.model_config
        if isinstance(module, Owner):
            module.fill_constants()  # transformers gives buffers that are not saved new memory, and no values
        if isinstance(module, Mixer):
            but_loaded(module, reset_mixer if self._built else Mixer.reset_parameters)
        elif isinstance(module, SwiGLU):
            but_loaded(module, lambda m: reset_mlp(m, config))
        elif isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            but_loaded(module, lambda m: nn.init.normal_(m.weight, std=config.init_std))
        elif isinstance(module, RMSNorm):
            but_loaded(module, RMSNorm.reset_parameters)


class DsfModel(DsfPreTrainedModel):
    """A model without its head, for transformers: input_ids [B, T] -> hidden states [B, T, d_model]."""

    layers: nn.ModuleList

    def __init__(self, config: DsfConfig) -> None:
        super().__init__(config)
        Backbone.build(self, config.model_config)
        self.post_init()

    run = Backbone.run
    _blocks = Backbone._blocks

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cache: Any = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids [B, T] or inputs_embeds [B, T, d_model] -> last_hidden_state [B, T, d_model] and the cache.

        cache, past_key_values: two names of one argument, a `DsfCache` with the states before this call.
        use_cache: whether to return the states after it. None: as the configuration says, but not in training mode.
        output_hidden_states: also return hidden_states: the input of every block, then last_hidden_state.
        attention_mask: [B, earlier tokens + T], 0 for padding, which may be on any side and is cut out.
        cu_seqlens, cu_seq_lens_q: two names of one argument, boundaries [S + 1] of sequences packed in one row.
        position_ids: [B, T]. Without a cache, a position 0 begins another packed sequence of the row; else ignored.
        Raises InputError unless one of input_ids and inputs_embeds is given, for ids outside the vocabulary (on a CPU),
        for boundaries beside a mask or of several rows, and for a cache of another model.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        if input_ids is not None:
            check_range("input_ids", input_ids, self.embed_tokens)
        cache = past_key_values if cache is None else cache
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch, tokens = x.shape[:2]
        bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        given = attention_mask, bounds, batch, tokens, cache, position_ids
        padding = padding_of(self, x, bounds, lambda: self._padding(*given))
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DsfCache(self.config)
        state = None if cache is None else states_of(cache, len(self.layers))
        wanted = (
            getattr(self.config, "output_hidden_states", None) if output_hidden_states is None else output_hidden_states
        )
        each: list[Tensor] | None = [] if wanted else None
        if padding is None:
            static = use_cache and state is not None and all(layer.static for layer in cache.layers)
            hidden, state = self.run(x, state, bounds, bool(use_cache), each, static)
        elif padding.empty:
            hidden = torch.zeros_like(x)
            each = None if each is None else [hidden] * (len(self.layers) + 1)
        else:  # once for the whole model
            hidden, state = self.run(padding.pack(x), state, Packing(padding.cu_seqlens), bool(use_cache), each)
            hidden = padding.unpack(hidden, x.shape)
            each = None if each is None else [padding.unpack(h, x.shape) for h in each]
        if use_cache:
            for i in range(len(self.layers)):
                state_layer(cache, i).store(None if state is None else state.layers[i], tokens, padding)
        more = {CACHE: cache if use_cache else None, "hidden_states": None if each is None else tuple(each)}
        return BaseModelOutputWithPast(last_hidden_state=hidden, **more)

    def _padding(
        self, mask: Any, bounds: Tensor | None, batch: int, tokens: int, cache: Any, position_ids: Tensor | None
    ) -> Unpadded | None:
        if mask is not None and bounds is not None:
            raise InputError("cu_seqlens and attention_mask say the same thing twice; give one of them")
        if bounds is not None and batch != 1:
            raise InputError(f"cu_seqlens: packed sequences lie in one row, got {batch} rows")
        first = None if cache is None else state_layer(cache, 0)
        return None if bounds is not None else unpadded(mask, batch, tokens, first, position_ids)


class DsfForCausalLM(DsfPreTrainedModel, GenerationMixin):
    """A causal language model around any mixers, for transformers' generate, Trainer and pipelines.

    Its parameters and their names are those of `dsf.models.CausalLM`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DsfConfig) -> None:
        super().__init__(config)
        self.model = DsfModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def of(cls, model: CausalLM) -> DsfForCausalLM:
        """A copy of a torch-only model with its weights. Raises InputError for what is no `CausalLM`."""
        if not isinstance(model, CausalLM):
            raise InputError(f"DsfForCausalLM.of takes a dsf.models.CausalLM, got {type(model).__name__}")
        made = cls(DsfConfig.of(as_built(model.config, model)))
        copy_weights(made, model)
        return made.train(model.training)

    def to_torch(self) -> CausalLM:
        """A copy as a torch-only model."""
        made = CausalLM(as_built(self.config.model_config, self))
        copy_weights(made, self)
        return made.train(self.training)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        num_items_in_batch: Any = None,
        cache: Any = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """As `DsfModel.forward`, but returns logits [B, T, vocab_size] and, with labels, the loss (mean in nats).

        In training with labels and config.fused_loss there are no logits.
        labels: [B, T], usually input_ids again. labels[:, t + 1] is the target of token t; -100 is no target.
        logits_to_keep: without labels, logits of so many last tokens, or of these places; 0: of all tokens.
        num_items_in_batch: what the summed loss is divided by; None: the number of targets.
        shift_labels: [B, T], each token's target, in place of labels, for sequences that ranks share.
        """
        shift_labels = more.get("shift_labels")  # in the signature, Trainer would ask every batch for it
        bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        cache = past_key_values if cache is None else cache
        each = more.get("output_hidden_states")
        given = input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, bounds
        out = self.model(*given, output_hidden_states=each, return_dict=True)
        hidden, after = out.last_hidden_state, {CACHE: getattr(out, CACHE), "hidden_states": out.hidden_states}
        if labels is None and shift_labels is None:
            counted = isinstance(logits_to_keep, int)
            part = slice(-int(logits_to_keep), None) if counted else logits_to_keep
            kept = hidden if counted and not logits_to_keep else hidden[:, part]
            return CausalLMOutputWithPast(logits=product_of(kept, self.lm_head), **after)
        check_labels(labels if shift_labels is None else shift_labels, hidden.shape[:2], self.model.embed_tokens)
        if labels is not None and bounds is None:
            labels = predicted(labels, attention_mask, None if cache is not None else position_ids)
        targets = targets_of(self.model, labels, shift_labels, bounds)
        assert targets is not None
        if self.training and self.config.fused_loss and reads_weight(self.lm_head, hidden):
            loss = linear_cross_entropy(hidden, self.lm_head.weight, targets, num_items_in_batch)
            return CausalLMOutputWithPast(loss=loss, **after)
        logits = self.lm_head(hidden)
        loss = cross_entropy(logits, targets, num_items_in_batch)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **after)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *_: Any, **__: Any) -> None:
        """Use `DsfCache` for all mixers, whose steps overwrite the states."""
        refuse_decoding("generate", self.model)
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static", "hybrid"):
            raise InputError(f"cache_implementation={kind!r}: a recurrent state can be dynamic or static")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = DsfCache(self.config, static=True)  # nobody else holds these states
        elif isinstance(model_kwargs.get(CACHE), Cache):
            states_of(model_kwargs[CACHE], self.config.n_layers)  # transformers' own layers may not count their tokens

    @staticmethod
    def create_masks_for_generate(*_: Any, attention_mask: Any = None, **__: Any) -> Any:
        """The mask as it is: padding is cut out, not masked."""
        return attention_mask

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters without weight decay: rates, biases and norms, but not embeddings."""
        return undecayed_names(self)


AutoConfig.register("dsf", DsfConfig, exist_ok=True)
AutoModel.register(DsfConfig, DsfModel, exist_ok=True)
AutoModelForCausalLM.register(DsfConfig, DsfForCausalLM, exist_ok=True)
