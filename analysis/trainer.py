"""transformers' Trainer as `dsf train` sets it up: fixed order of data, no decay of rates, whole checkpoints."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from dsf.language.errors import DsfError
from dsf.mixers.models.hf import DsfConfig, DsfForCausalLM
from dsf.mixers.models.weights import undecayed_names

if TYPE_CHECKING:
    from dsf.analysis.train import Prepared, Progress


def make_trainer(prepared: Prepared, progress: Progress | None) -> Any:
    """The trainer of a run, its model drawn from the run's seed."""
    run = prepared.run
    every = max(1, run.steps // max(1, run.saves))
    arguments = TrainingArguments(
        output_dir=str(run.out / "checkpoints"), max_steps=run.steps, per_device_train_batch_size=run.batch,
        per_device_eval_batch_size=run.batch, learning_rate=prepared.identity["lr"], weight_decay=0.1, adam_beta1=0.9,
        adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=max(1, min(200, run.steps // 10)),
        save_strategy="steps", save_steps=every, save_total_limit=2, eval_strategy="steps", eval_steps=every,
        logging_steps=max(1, run.steps // 200), prediction_loss_only=True, bf16=run.bf16, torch_compile=run.compile,
        use_cpu=run.device == "cpu", seed=run.seed, data_seed=run.seed, report_to=[], disable_tqdm=True,
        dataloader_num_workers=0, dataloader_pin_memory=run.device != "cpu", logging_nan_inf_filter=False,
    )  # fmt: skip
    torch.manual_seed(run.seed)
    model = DsfForCausalLM(DsfConfig.of(prepared.config))
    trainer = _Trainer(
        model, arguments, train_dataset=prepared.train, eval_dataset=prepared.held_out,
        callbacks=[_Watch(progress)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Trainer(Trainer):
    """Trainer with the order of the data fixed and checkpoints that are whole or not there."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Matrices decay; vectors, and the rates that mixers mark, do not."""
        apart = undecayed_names(model)
        return [name for name, _ in model.named_parameters() if name not in apart]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(*args, **kwargs)
            (folder / "whole").touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Keep a line of the log; nothing is printed."""
        super().log(logs, *args, **kwargs)
        loss = logs.get("loss")
        if loss is not None and not math.isfinite(loss):
            raise DsfError(f"the loss is not finite after {self.state.global_step} steps; try a smaller --lr")


class _Watch(TrainerCallback):
    """Progress, without transformers' own printing."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.loss = progress, math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Remember the loss."""
        self.loss = (logs or {}).get("loss", self.loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Show the step."""
        if self.progress is not None:
            self.progress(state.global_step, self.loss)
