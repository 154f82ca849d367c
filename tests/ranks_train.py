"""What the ranks of tests/test_train.py do: `dsf train` in each process, as torchrun would start it."""

import os
from traceback import format_exception

import torch.distributed as dist
from typer.testing import CliRunner

SMALLEST = {"d_model": 32, "n_layers": 2, "n_heads": 2, "context_length": 64}


def trained(folder, words):
    """The exit code and the output of the command in this folder."""
    os.chdir(folder)
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from dsf.analysis import train
    from dsf.analysis._cli_app import app

    train.SIZES["tiny"] = SMALLEST
    done = CliRunner().invoke(app, ["train", *words])
    return done.exit_code, done.output + ("" if done.exception is None else "".join(format_exception(done.exception)))
