"""The processes that torchrun starts for `dsf train`: dp groups share the batch, cp ranks each sequence, tp ranks
the heads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dsf.language.errors import InputError

if TYPE_CHECKING:
    from dsf.analysis.train import Run
    from dsf.parallel import Sequence

STATE = "state"  # a checkpoint's folder with model and optimizer of all processes


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and the sizes of the three groups; dp · cp · tp processes in all."""

    rank: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, run: Run) -> Ranks:
        """The Ranks of a run. Raises InputError for sizes that do not fit the number of processes."""
        world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if world % (run.cp * run.tp):
            raise InputError(
                f"--cp {run.cp} and --tp {run.tp} need a multiple of {run.cp * run.tp} processes, and there "
                f"{'is' if world == 1 else 'are'} {world}: torchrun --no-python --nproc-per-node {run.cp * run.tp} dsf "
                "train ..."
            )
        dp = world // (run.cp * run.tp)
        if run.batch % dp:
            raise InputError(f"--batch {run.batch}: {dp} groups of processes cannot share it evenly")
        if run.seq < run.cp:
            raise InputError(f"--seq {run.seq}: {run.cp} processes have too few tokens to share")
        if world > 1 and run.compile:
            raise InputError("--compile works in one process only, and torchrun started several")
        return cls(rank, dp, run.cp, run.tp)

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.dp * self.cp * self.tp

    @property
    def place(self) -> int:
        """The number of this process's part of a batch, of dp parts."""
        return self.rank // (self.cp * self.tp)

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """Process groups inside the block: NCCL between GPUs, gloo between CPUs."""
        if self.world == 1 or dist.is_initialized():
            yield
            return
        if device != "cpu":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        try:
            yield
        finally:
            dist.destroy_process_group()

    def wait(self) -> None:
        """Wait until every process has called this."""
        if self.world > 1:
            dist.barrier()

    def spread(self, model: nn.Module, seq: int) -> tuple[nn.Module, Sequence]:
        """(the model spread over the ranks by tensor and context parallelism and FSDP2, the Sequence of the ranks
        that share tokens).
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import parallelize_module

        from dsf import parallel

        kind = next(model.parameters()).device.type
        mesh = init_device_mesh(kind, (self.dp, self.cp, self.tp), mesh_dim_names=("dp", "cp", "tp"))
        if self.tp > 1:
            parallelize_module(model, mesh["tp"], parallel.plan_of(model))
        sizes = [len(part) for part in torch.arange(seq).tensor_split(self.cp)]
        sequence = parallel.Sequence(mesh["cp"], sizes=sizes)
        if self.cp > 1:
            parallel.attach(model, sequence)
        if self.dp * self.cp > 1:
            parallel.prepare(model, mesh=mesh["dp", "cp"]._flatten("fsdp"))
        return model, sequence


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The unsharded parameters on the first rank, nothing elsewhere."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
