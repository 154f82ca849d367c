"""`CausalLM`: a causal language model around any mixers, in torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsf import Packing
from dsf.call.packing import check_row
from dsf.language.errors import InputError
from dsf.mixers import Mixer
from dsf.mixers._beside import handing, hooked, product_of
from dsf.mixers._states import joined, put, reserved
from dsf.mixers._typed import called_as
from dsf.mixers.models.config import ATTENTION, ModelConfig
from dsf.mixers.models.naming import constructor_of, layer_in_model, takes
from dsf.mixers.models.parts import RMSNorm, SwiGLU, check_ids, cross_entropy, linear_cross_entropy
from dsf.mixers.models.rotary import RotaryAttention
from dsf.mixers.models.sampling import sample
from dsf.mixers.models.spread import refuse_decoding, targets_of, world_of
from dsf.mixers.models.states import ModelState, check_fit, check_state, checkpointed, recurrence_of, sequences_of
from dsf.mixers.models.weights import is_tied, reads_weight, tie, undecayed_names

Turn = tuple[Tensor, Tensor]  # cos, sin


@dataclass(frozen=True)
class CausalOutput:
    """The output of a model.

    logits: [B, T, vocab_size], of a step [B, vocab_size]; None in training with labels and config.fused_loss.
    loss: mean cross entropy in nats of the tokens with a target; None without labels.
    state: a `ModelState`; None with return_state=False.
    """

    logits: Tensor | None
    loss: Tensor | None
    state: ModelState | None


def build_mixer(config: ModelConfig, mixer: str, index: int) -> Mixer:
    """The mixer of one layer: for softmax attention one with the model's rotary positions, else `layer_in_model`."""
    make, options = constructor_of(mixer), dict(config.mixer_options.get(mixer, {}))
    if takes(make, "n_heads"):
        options.setdefault("n_heads", config.heads(mixer))
    if takes(make, "layer_idx"):
        options["layer_idx"] = index
    if mixer == ATTENTION and config.rope_base is not None:
        return RotaryAttention(config.d_model, **{"rope_base": config.rope_base, **options})
    return layer_in_model(mixer, config.d_model, **options)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)).

    gradient_checkpointing: in training, keep x alone and compute everything else again in the backward pass.
    """

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index = index
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = build_mixer(config, config.layer_mixers[index], index)
        self.mixer.behind = True
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.hidden)
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Any] = partial(checkpoint, use_reentrant=False)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        cu_seqlens: Tensor | Packing | None = None,
        turn: Turn | None = None,
        keep: bool = True,
        in_place: bool = False,
        late: Tensor | None = None,
        open_ended: bool = False,
    ) -> tuple[Any, Any]:
        """x [B, T, d_model] -> (x after the block, the mixer's new state or None).

        turn: cos and sin of rotary positions, for a mixer that takes them. keep: whether to return the state. in_place:
        a decode step writes into the state's memory. late: the last block's output, which the launch of this block's
        norm still adds to x. open_ended: return (x, this block's output) in place of their sum.
        """
        made = None
        if late is None:
            y = self.mixer_norm(x)
        else:
            x, y, made = self.mixer_norm.added_ahead(x, late, self.mixer)
        with nullcontext() if made is None else handing(y, made):
            mixed, state = self._mix(y, state, cu_seqlens, turn, keep, in_place)
        x, late = self.mlp.after(self.mlp_norm, x, mixed)
        return ((x, late) if open_ended else x + late), state

    def _mix(
        self, x: Tensor, state: Any, cu_seqlens: Tensor | Packing | None, turn: Turn | None, keep: bool, in_place: bool
    ) -> tuple[Tensor, Any]:
        one = x.shape[1] == 1 and state is not None and cu_seqlens is None and not torch.is_grad_enabled()
        # a decode step is one launch, but passes hooks by
        if one and getattr(self.mixer, "parallel", None) is None and not hooked(self.mixer):
            now: dict[str, Any] = {"in_place": True} if in_place else {}
            if turn is not None:
                now |= {"cos": turn[0][:, 0], "sin": turn[1][:, 0]}
            y, state = self.mixer.step(x[:, 0], state, **now)
            return y.unsqueeze(1), state
        tokens: dict[str, Any] = {} if turn is None else {"cos": turn[0], "sin": turn[1]}
        y, after = self.mixer(x, state, cu_seqlens, use_cache=keep, **tokens)
        return y, put(state, after) if in_place and one and keep else after


class Backbone(nn.Module):
    """A model without its head: embedding, blocks and the last norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.build(config)

    def build(self, config: ModelConfig) -> None:
        """Create the modules; separate from __init__ for classes with another base's constructor."""
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)

    def run(
        self, x: Tensor, state: ModelState | None = None, cu_seqlens: Tensor | Packing | None = None, keep: bool = True,
        hidden: list[Tensor] | None = None, in_place: bool = False,
    ) -> tuple[Tensor, ModelState | None]:  # fmt: skip
        """x, embedded tokens [B, T, d_model] -> (the output of the last norm [B, T, d_model], state or None).

        keep: whether to return the state. hidden: a list to which every block's input and the output are added.
        in_place: a decode step writes into the memory of `state`, as far as mixers can.
        """
        blocks = list(self._blocks())
        mixers = [block.mixer for block in blocks]
        if state is not None:
            check_state(state, mixers, x.shape[0] if cu_seqlens is None else sequences_of(cu_seqlens))
        turns: dict[tuple[int, float], Turn] = {}
        after, late = [], None
        wrapped = not all(isinstance(b, Block) for b in blocks)
        whole = wrapped or any(b._forward_hooks or (self.training and b.gradient_checkpointing) for b in blocks)
        open_ended = hidden is None and not whole and self.norm.sums(x)
        for i, block in enumerate(blocks):
            before = None if state is None else state.layers[i]
            if hidden is not None:
                hidden.append(x)
            if state is not None:
                check_fit(before, block.mixer, i)
            turn = None
            if isinstance(block.mixer, RotaryAttention):  # layers of the same width share one
                kind = (block.mixer.dims[1], block.mixer.rope_base)
                turn = turns[kind] = turns.get(kind) or block.mixer.turns(x, before, cu_seqlens)
            if self.training and block.gradient_checkpointing:
                x, new = checkpointed(block, x, before, cu_seqlens, turn, keep, in_place)
            elif open_ended:
                (x, late), new = block(x, before, cu_seqlens, turn, keep, in_place, late, True)
            else:
                x, new = block(x, before, cu_seqlens, turn, keep, in_place)
            after.append(new)
        x = self.norm(x) if late is None else self.norm.added(x, late)[1]
        if hidden is not None:
            hidden.append(x)
        return x, ModelState(tuple(after), tuple(map(recurrence_of, mixers))) if keep else None

    def _blocks(self) -> Iterator[Block]:
        for block in self.layers:
            yield cast(Block, block)  # or what wraps one and answers for it (checkpoint_wrapper, torch.compile)


def _hint(config: Any) -> str:
    return "; its model_config is one" if isinstance(getattr(config, "model_config", None), ModelConfig) else ""


class CausalLM(nn.Module):
    """A causal language model: embedding, blocks of mixer and SwiGLU, norm, head.

    A sequence has the same logits whole, in pieces with the state, token by token, and packed with other sequences.
    `model.config` is its `ModelConfig`. `load_state_dict` takes the state dict of a model with the same configuration.
    `dsf.models.hf.DsfForCausalLM` has the same parameter names.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise InputError(f"CausalLM takes a ModelConfig, got {type(config).__name__}{_hint(config)}")
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            tie(self)
        self._start(Mixer.reset_parameters)  # what is inside mixers was drawn when it was made

    def reset_parameters(self) -> None:
        """Initialise all weights: embeddings and MLPs normal, the MLPs' projections into the residual stream smaller
        with depth, mixers as in their papers. For a model made on the meta device, call it after `to_empty`."""
        self._start(reset_mixer)

    @torch.no_grad()
    def _start(self, reset: Callable[[Mixer], None]) -> None:
        for weight in (self.model.embed_tokens.weight, self.lm_head.weight):
            nn.init.normal_(weight, std=self.config.init_std)
        for block in self.model._blocks():
            reset(block.mixer)
            reset_mlp(block.mlp, self.config)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """torch's `_apply`, but a tied head stays tied where parameters get new memory (`to_empty`)."""
        tied = is_tied(self)
        super()._apply(fn, recurse)
        if tied:
            tie(self)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's. Raises RuntimeError for weights that do not fit. This includes a head that differs from the
        embedding if this model ties the two, as one of them would be lost."""
        embedding, head = state_dict.get("model.embed_tokens.weight"), state_dict.get("lm_head.weight")
        if self.config.tie_embeddings and head is not None and embedding is not None and _differ(embedding, head):
            raise RuntimeError(
                "the weights have a head of their own, lm_head.weight, and this model's is its embedding: make it with "
                "tie_embeddings=False"
            )
        tied = is_tied(self)
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            if tied:  # assign=True gave each a parameter of its own
                given = self.lm_head if embedding is None and head is not None else self.model.embed_tokens
                self.lm_head.weight = self.model.embed_tokens.weight = given.weight

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        state: ModelState | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        return_state: bool = True,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        in_place: bool = False,
    ) -> CausalOutput:
        """Predict the next token after every token.

        ids: int64 or int32 [B, T], from 0 to vocab_size - 1.
        labels: [B, T], usually ids again. labels[:, t + 1] is the target of token t; -100 is no target.
        state: the .state of an earlier call, to continue its sequences.
        cu_seqlens: boundaries [S + 1] of sequences packed along T, or a dsf.Packing. B is then 1, and the state has S
          rows. No token of a sequence is the target of another sequence.
        return_state: False saves memory and time in training.
        shift_labels: [B, T], the target of each token (`next_labels(labels)`), in place of labels. Ranks that share a
          sequence pass the part of it that belongs to their tokens.
        num_items_in_batch: what the summed loss is divided by; None: the number of this call's targets.
        in_place: as in `step`.
        Raises InputError for shapes and states that do not fit, for both kinds of labels, for ids and labels outside
        the vocabulary (on a CPU), and for in_place in other calls than a step.
        """
        self._check(ids, labels if shift_labels is None else shift_labels, cu_seqlens)
        if in_place and (state is None or ids.shape[1] != 1 or cu_seqlens is not None or torch.is_grad_enabled()):
            raise InputError("in_place=True is for a step: a state, one token a sequence, and no gradients")
        hidden, state = self.model.run(self.model.embed_tokens(ids), state, cu_seqlens, return_state, None, in_place)
        targets = targets_of(self.model, labels, shift_labels, cu_seqlens)
        if targets is None:
            return CausalOutput(product_of(hidden, self.lm_head), None, state)
        if self.training and self.config.fused_loss and reads_weight(self.lm_head, hidden):
            loss = linear_cross_entropy(hidden, self.lm_head.weight, targets, num_items_in_batch)
            return CausalOutput(None, loss, state)
        logits = self.lm_head(hidden)
        return CausalOutput(logits, cross_entropy(logits, targets, num_items_in_batch), state)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @torch.no_grad()
    def step(self, ids: Tensor, state: ModelState | None = None, in_place: bool = False) -> CausalOutput:
        """One more token of each sequence, without gradients. ids: [B] -> logits [B, vocab_size] and the state.

        in_place: the new state overwrites `state`, so that nothing is copied and a CUDA graph finds it where it was.
        Without a state it changes nothing. Attention's keys and values move to memory of twice the size where theirs is
        full, and in the first such step unless `reserve` made room. Raises InputError for ids of another shape, a state
        that does not fit, and while ranks share the sequence.
        """
        refuse_decoding("step", self.model)
        if ids.dim() != 1:
            raise InputError(f"step takes one token a sequence, ids [B], got shape {tuple(ids.shape)}")
        found = self(ids.unsqueeze(1), state=state, in_place=in_place and state is not None)
        assert found.logits is not None  # without labels
        return CausalOutput(found.logits[:, 0], None, found.state)

    def reserve(self, state: ModelState, tokens: int) -> ModelState:
        """The state with room for steps with in_place=True. tokens: of a sequence in all, those so far included.

        Attention's keys and values are copied to memory for so many tokens, unless theirs has room. Other tensors are
        those of `state`, or contiguous copies. Raises InputError for a state of another model."""
        mixers = [block.mixer for block in self.model._blocks()]
        check_state(state, mixers, None)
        return state.renewed(reserved(mixer, s, tokens) for mixer, s in zip(mixers, state.layers, strict=True))

    def join(self, states: Sequence[ModelState]) -> ModelState:
        """One state with the sequences of several states, in their order. `ModelState.select` takes some out again.

        The sequences may have had different numbers of tokens. Everything is copied. The host waits for the GPU if
        attention's keys and values lie in the memory of steps in place. Raises InputError for no states, and for a
        state of another model.
        """
        mixers = [block.mixer for block in self.model._blocks()]
        if not states:
            raise InputError("no states to join")
        for state in states:
            check_state(state, mixers, None)
        layers = zip(mixers, *(state.layers for state in states), strict=True)
        return states[0].renewed(joined(mixer, parts) for mixer, *parts in layers)

    def generate(
        self,
        ids: Tensor,
        n: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        graph: bool = False,
    ) -> Tensor:
        """ids [B, T] with `n` more tokens each: [B, T + n]. temperature: divides the logits; 0 takes the likeliest.
        top_k: draw from so many likeliest. generator: of the random numbers. graph: decode by a CUDA graph. `sample`
        says more. Raises InputError for arguments that do not fit."""
        return sample(self, ids, n, temperature, top_k, generator, graph)

    def enable_gradient_checkpointing(self, on: bool = True, **options: Any) -> None:
        """In training, keep the inputs of blocks alone, and compute everything else again in the backward pass.

        options: those of torch.utils.checkpoint.checkpoint. A CUDA graph needs preserve_rng_state=False, which is right
        for blocks without random numbers: dsf's layers use none.
        """
        for block in self.model._blocks():
            block.gradient_checkpointing = on
            block._gradient_checkpointing_func = partial(checkpoint, **{"use_reentrant": False, **options})

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters without weight decay: rates, biases and norms, but not embeddings."""
        return undecayed_names(self)

    def parameter_count(self, embeddings: bool = True) -> int:
        """How many learnt numbers the model has, shared ones once. embeddings: count those of embedding and head."""
        outer = {id(p) for part in (self.model.embed_tokens, self.lm_head) for p in part.parameters()}
        return sum(p.numel() for p in self.parameters() if embeddings or id(p) not in outer)

    def state_size(self, context: int = 0) -> int:
        """How many numbers one sequence's state has after `context` tokens."""
        return sum(block.mixer.state_size(context) for block in self.model._blocks())

    def _check(self, ids: Tensor, labels: Tensor | None, cu_seqlens: Tensor | Packing | None) -> None:
        if not isinstance(ids, Tensor):
            raise InputError(f"ids: expected integers [B, T] as a tensor, got {type(ids).__name__}")
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"ids: expected integers [B, T], got {ids.dtype} of shape {tuple(ids.shape)}")
        if ids.shape[1] == 0 and world_of(self.model) is None:  # a rank's shard may be empty
            raise InputError("ids has no tokens")
        check_ids(ids, labels, self.model.embed_tokens)
        if cu_seqlens is not None:
            check_row(type(self).__name__, cu_seqlens, ids.shape[0])


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two whole tensors hold different numbers; shards and tensors without memory are not looked into."""
    if one is other or any(x.is_meta or hasattr(x, "device_mesh") for x in (one, other)):
        return False
    return one.shape != other.shape or not torch.equal(one, other.to(one.device, one.dtype))


def reset_mixer(mixer: nn.Module) -> None:
    """Initialise a mixer and all modules inside it as in its paper."""
    for module in mixer.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def reset_mlp(mlp: SwiGLU, config: ModelConfig) -> None:
    """Normal weights; those into the residual stream are divided by sqrt(2 n_layers), as in GPT-2."""
    for linear in (mlp.gate_proj, mlp.up_proj):
        nn.init.normal_(linear.weight, std=config.init_std)
    nn.init.normal_(mlp.down_proj.weight, std=config.init_std * (2 * config.n_layers) ** -0.5)
