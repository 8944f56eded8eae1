#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""What 02_train_gpt does, with PyTorch's FSDP2 on CPUs:

    mpirun -n 1 02_train_gpt --steps 0 --save start
    mpirun -n 2 02_train_gpt --load start --optimizer sgd --lr 0.1 --steps 50 --csv ours.csv
    torchrun --nproc-per-node 2 02_train_gpt.py --load start --optimizer sgd --lr 0.1 --steps 50 --csv pytorch.csv

The flags are those of 02_train_gpt. --load takes the parameters and the step of a checkpoint of 02_train_gpt; the
optimizer starts afresh. --save writes one of torch.distributed.checkpoint: "model", "optimizer" and "step". Needs
torch, numpy and h5py.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "checkpoints"))
STEPS_PER_LINE = 20


def whole(param):
    """As a plain tensor: with tp, what is on all of its ranks is a DTensor too, which plain tensors do not mix with."""
    return param.to_local() if isinstance(param, DTensor) else param


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, self.gain.shape, whole(self.gain), whole(self.bias), 1e-5)


def linear(inputs, outputs, deviation):
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, 0, deviation)
    nn.init.zeros_(layer.bias)
    return layer


class Block(nn.Module):
    def __init__(self, width, heads, deviation):
        super().__init__()
        self.length = width // heads
        self.norm1 = Norm(width)
        self.qkv = linear(width, 3 * width, 0.02)
        self.out = linear(width, width, deviation)
        self.norm2 = Norm(width)
        self.up = linear(width, 4 * width, 0.02)
        self.down = linear(4 * width, width, deviation)

    def forward(self, x):
        # One head after another: its query, key and value. With tp, the heads of this rank.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.length))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, values, context, width, heads, layers):
        super().__init__()
        self.layers = layers
        self.tokens = nn.Parameter(torch.randn(values, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.norm = Norm(width)
        for i in range(layers):
            setattr(self, f"block{i}", Block(width, heads, 0.02 / math.sqrt(2 * layers)))

    def blocks(self):
        return [getattr(self, f"block{i}") for i in range(self.layers)]

    def forward(self, bytes):
        tokens = whole(self.tokens)
        x = F.embedding(bytes, tokens) + whole(self.positions)
        for block in self.blocks():
            x = block(x)
        return F.linear(self.norm(x), tokens)

    def parameters_by_key(self):
        """By the names that they have in checkpoints."""
        return {name if name.startswith("block") else "root." + name: p for name, p in self.named_parameters()}


def cut_by_tensor_parallelism(model, mesh):
    """As 02_train_gpt cuts it: some of the heads and of the hidden units on each rank."""
    for block in model.blocks():
        parallelize_module(block, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(),
                                         "down": RowwiseParallel()})
    # The others are whole on each rank, but on the same mesh: one norm of all gradients needs that.
    distribute_module(model, mesh)


def shard(model, mesh, policy):
    """Gradients are summed over the ranks: the loss is a mean over the global batch already."""
    for module in [*model.blocks(), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in [*model.blocks(), model]:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_parameter(param, value):
    with torch.no_grad():
        if hasattr(param, "device_mesh"):
            value = distribute_tensor(value, param.device_mesh, param.placements)
        param.copy_(value)


def mix(x):
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def samples_of(text, context, seed, step, numbers):
    """Bytes and targets of some of the samples of a step."""
    base = mix((mix(seed) + step) % 2**64)
    starts = [mix((base + number) % 2**64) % (len(text) - context) for number in numbers]
    rows = torch.stack([text[at : at + context + 1] for at in starts]) if starts else text.new_empty(0, context + 1)
    return rows[:, :-1], rows[:, 1:]


def chunk(numbers, parts, part):
    size = -(-len(numbers) // parts)
    return numbers[part * size : (part + 1) * size]


def parse():
    parser = argparse.ArgumentParser(prog="02_train_gpt.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--text", default="/usr/share/common-licenses/GPL-3")
    for name, default in [("--replicate", 1), ("--tp", 1), ("--accumulate", 1), ("--steps", 600), ("--batch", 16),
                          ("--layers", 2), ("--width", 128), ("--heads", 4), ("--context", 64), ("--seed", 1)]:
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dp", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--clip", type=float, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--csv")
    o = parser.parse_args()
    if o.heads % o.tp != 0:
        parser.error(f"{o.heads} --heads cannot be shared out among --tp {o.tp} ranks: choose a multiple")
    return o


def main():
    o = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dp = o.dp or dist.get_world_size() // (o.replicate * o.tp)
    mesh = init_device_mesh("cpu", (o.replicate, dp, o.tp), mesh_dim_names=("replicate", "dp", "tp"))
    torch.manual_seed(o.seed)
    model = Gpt(256, o.context, o.width, o.heads, o.layers)
    if o.tp > 1:
        cut_by_tensor_parallelism(model, mesh["tp"])
    shard(model, mesh["replicate", "dp"] if o.replicate > 1 else mesh["dp"],
          MixedPrecisionPolicy(torch.bfloat16, torch.float32) if o.bf16 else MixedPrecisionPolicy())
    step = 0
    if o.load:
        from read_checkpoint import Checkpoint

        checkpoint = Checkpoint(o.load)
        step = checkpoint.step
        for key, param in model.parameters_by_key().items():
            set_parameter(param, torch.from_numpy(checkpoint.read(key)))
    if o.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=o.lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr)

    text = torch.tensor(list(Path(o.text).read_bytes()))
    own = chunk(range(o.batch), o.replicate * dp, dist.get_rank() // o.tp)
    speaks = dist.get_rank() == 0
    csv = open(o.csv, "w") if speaks and o.csv else None
    print("step,loss", file=csv) if csv else None
    last_printed, last_time = step, time.monotonic()
    while step < o.steps:
        step += 1
        optimizer.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64)
        for part in range(o.accumulate):
            model.set_requires_gradient_sync(part == o.accumulate - 1)
            inputs, targets = samples_of(text, o.context, o.seed, step, chunk(own, o.accumulate, part))
            logits = model(inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / (o.batch * o.context)
            loss.backward()
            loss_sum += loss.detach()
        if o.clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        dist.all_reduce(loss_sum)
        loss_sum /= o.tp  # whose ranks have the same samples
        if csv:
            print(f"{step},{loss_sum.item():.17g}", file=csv, flush=True)
        if speaks and (step == 1 or step % STEPS_PER_LINE == 0 or step == o.steps):
            now = time.monotonic()
            rate = o.batch * o.context * (step - last_printed) / (now - last_time)
            print(f"step {step:6}  loss {loss_sum.item():.4f}  {rate:.0f} bytes/s", flush=True)
            last_printed, last_time = step, now
    if o.save:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step},
                 storage_writer=dcp.FileSystemWriter(o.save, overwrite=False))
        if speaks:
            print(f"saved {o.save}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
