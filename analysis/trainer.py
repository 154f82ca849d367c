"""transformers' Trainer for `dsf train`: data in a fixed order, no weight decay of rates, complete checkpoints."""

from __future__ import annotations

import math
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dsf.analysis.checkpoints import WHOLE, unreadable
from dsf.analysis.ranks import STATE
from dsf.language.errors import DsfError
from dsf.mixers.models.graphed import Graphed
from dsf.mixers.models.hf import DsfConfig, DsfForCausalLM
from dsf.mixers.models.parts import IGNORED, next_labels
from dsf.mixers.models.weights import undecayed_names
from dsf.parallel.checkpoint import Checkpoint

if TYPE_CHECKING:
    from dsf.analysis.train import Prepared, Progress


def make_trainer(prepared: Prepared, progress: Progress | None) -> Any:
    """The trainer of a run. The seed determines the initial model."""
    run = prepared.run
    every = max(1, run.steps // max(1, run.saves))
    arguments = TrainingArguments(
        output_dir=str(run.out / "checkpoints"), max_steps=run.steps,
        per_device_train_batch_size=run.batch // run.ranks.dp, per_device_eval_batch_size=run.batch,
        learning_rate=prepared.identity.lr, weight_decay=0.1, adam_beta1=0.9,
        adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=max(1, min(200, run.steps // 10)),
        save_strategy="steps", save_steps=every, save_total_limit=2, eval_strategy="steps", eval_steps=every,
        logging_steps=max(1, run.steps // 200), prediction_loss_only=True, bf16=run.bf16, torch_compile=run.compile,
        use_cpu=run.device == "cpu", seed=run.seed, data_seed=run.seed, report_to=[], disable_tqdm=True,
        dataloader_num_workers=0, dataloader_pin_memory=run.device != "cpu", logging_nan_inf_filter=False,
    )  # fmt: skip
    torch.manual_seed(run.seed)
    model = DsfForCausalLM(DsfConfig.of(prepared.config))
    kind = _Trainer if run.ranks.world == 1 else _SpreadTrainer
    trainer = kind(prepared, model, arguments, progress)
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Trainer(Trainer):
    """A Trainer with a fixed order of data, whose checkpoints are complete or absent.

    Checkpoints are of `torch.distributed.checkpoint` (`dsf.parallel.Checkpoint`): any number of processes can resume
    from them.
    """

    model: Any  # transformers declares each of these as optional
    args: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    def __init__(self, prepared: Prepared, model: Any, arguments: TrainingArguments, progress: Progress | None) -> None:
        self.prepared = prepared
        self._graphed: Graphed | None = None
        super().__init__(
            model, arguments, train_dataset=prepared.train, eval_dataset=prepared.held_out, callbacks=[_Watch(progress)]
        )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The mean over the batch's targets, which the model counts: early releases of 5 count the first token too."""
        return super().compute_loss(*args, **{**kwargs, "num_items_in_batch": None})

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; then free the graphs, for which NCCL would wait when the process group is destroyed."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._graphed is not None:
                self._graphed.clear()

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, with gradients in .grad; from a CUDA graph where the run asks for one."""
        run = self.prepared.run
        if not run.graph or run.compile or self.args.device.type != "cuda":
            return super().training_step(model, inputs, *args, **kwargs)
        model.train()
        if self._graphed is None:
            self._graphed = Graphed(model, partial(self._loss, model))
        return self._graphed(inputs["input_ids"], inputs["labels"])

    def _loss(self, model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        return self.compute_loss(model, {"input_ids": ids, "labels": labels})

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The names of matrices, without those of vectors and of rates that mixers mark."""
        apart = undecayed_names(model)
        return [name for name, _ in model.named_parameters() if name not in apart]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder, ranks = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}", self.prepared.run.ranks
        try:
            super()._save_checkpoint(*args, **kwargs)
            ranks.wait()
            if ranks.rank == 0:
                (folder / WHOLE).touch()
            ranks.wait()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Do nothing: the model is saved with its optimizer."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with _checkpointing():
            dcp.save({"training": self._checkpoint()}, checkpoint_id=str(Path(output_dir) / STATE))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the model is loaded with its optimizer, which is made later."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        try:
            with _checkpointing():
                dcp.load({"training": self._checkpoint()}, checkpoint_id=str(Path(checkpoint) / STATE))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))
        except Exception as error:  # each library has its own error classes
            raise unreadable(checkpoint, str(error).strip().partition("\n")[0] or type(error).__name__) from error

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model, getattr(self.optimizer, "optimizer", self.optimizer))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Keep a line of the log without printing it. Raises DsfError for a loss that is not finite."""
        super().log(logs, *args, **kwargs)
        if not all(math.isfinite(logs.get(name, 0.0)) for name in ("loss", "eval_loss")):
            raise DsfError(f"the loss is not finite after {self.state.global_step} steps; try a smaller --lr")


class _SpreadTrainer(_Trainer):
    """The same for several processes, each with its part of the model, of every batch and of every sequence."""

    def __init__(self, prepared: Prepared, model: Any, arguments: TrainingArguments, progress: Progress | None) -> None:
        self.ranks = prepared.run.ranks
        shared, self.sequence = self.ranks.spread(model.to(arguments.device), prepared.run.seq)
        super().__init__(prepared, shared, arguments, progress)
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)  # autocast
        self.model._is_accelerate_prepared = True  # already sharded: accelerate must not wrap it

    def new_model(self, state: dict[str, Any]) -> Any:
        """An unsharded model with these parameters."""
        model = DsfForCausalLM(DsfConfig.of(self.prepared.config))
        model.load_state_dict(state)
        return model

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This process's part of every batch."""
        run, part = self.prepared.run, self.prepared.run.batch // self.ranks.dp
        first = range(self.ranks.place * part, run.steps * run.batch, run.batch)
        batches = [list(range(begin, begin + part)) for begin in first]
        return DataLoader(self.prepared.train, batch_sampler=batches, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """All held-out windows on every process, which share only the sequences; batches have equal sizes and so
        equal weights.
        """
        windows = len(self.prepared.held_out)
        size = next(n for n in range(min(self.prepared.run.batch, windows), 0, -1) if windows % n == 0)
        return DataLoader(self.prepared.held_out, size, collate_fn=self.data_collator)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """A loss whose mean over the processes is the batch's loss; the same holds for its gradients."""
        targets = next_labels(inputs["labels"])
        parts = self.ranks.dp if model.training else 1
        count = (targets != IGNORED).sum() * parts
        ids, targets = self.sequence.shard(inputs["input_ids"], targets)
        outputs = model(input_ids=ids, shift_labels=targets, num_items_in_batch=count)
        loss = outputs.loss * (parts * self.ranks.cp)
        return (loss, {"loss": loss}) if return_outputs else loss


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Turn torch's checkpoint exceptions into ordinary ones, and suppress its warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        try:
            yield
        except dcp.CheckpointException as error:  # a BaseException, with what went wrong on each rank
            first, *_ = error.failures.values()
            if isinstance(first[0], OSError | KeyboardInterrupt):  # the latter is Ctrl-C, or SIGTERM
                raise first[0] from error
            raise RuntimeError(str(error).strip().rpartition("\n")[2]) from error


class _Watch(TrainerCallback):
    """Progress reports without transformers' printing."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.loss = progress, math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the loss."""
        self.loss = (logs or {}).get("loss", self.loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step."""
        if self.progress is not None:
            self.progress(state.global_step, self.loss)
