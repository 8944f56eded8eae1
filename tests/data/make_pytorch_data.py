# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Makes pytorch_gpt.json and pytorch_gpt.f32 beside it: what PyTorch's FSDP2 computes on 2 ranks.

    torchrun --nproc-per-node 2 make_pytorch_data.py

The model is that of examples/02_train_gpt.py. pytorch_gpt.f32 has little-endian f32 arrays, without gaps: for each of
the manifest's "sections" all parameters in the order of "parameters". Sections are "start"; of every step "gradient",
"sgd" (parameters after the step) and "adamw" (parameters after AdamW took the same gradient). Nothing is written unless
the gradients, losses and parameters are those of an unsharded run: a reduction may be wrong without a word.
"""

import importlib.util
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

FOLDER = Path(__file__).resolve().parent
SHAPE = {"values": 32, "context": 8, "width": 16, "heads": 2, "layers": 1}
SAMPLES, STEPS = 4, 5
SGD = {"lr": 0.03, "momentum": 0.9}
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def import_twin():
    spec = importlib.util.spec_from_file_location("train_gpt", FOLDER.parent.parent / "examples/02_train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TWIN = import_twin()


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(start, inputs, targets, ranks, rank, policy):
    """Losses, and for each step all gradients and the parameters afterwards. policy None: unsharded."""
    model = TWIN.Gpt(**SHAPE)
    if policy is not None:
        TWIN.shard(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), policy)
    parameters = model.parameters_by_key()
    for key, param in parameters.items():
        TWIN.set_parameter(param, start[key])
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    own = slice(SAMPLES * rank // ranks, SAMPLES * (rank + 1) // ranks)
    losses, gradients, after = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(inputs[step][own])
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets[step][own].flatten(), reduction="sum")
        loss = loss / (SAMPLES * SHAPE["context"])
        loss.backward()
        total = loss.detach().double()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item())
        gradients.append({key: full(param.grad) for key, param in parameters.items()})
        optimizer.step()
        after.append({key: full(param) for key, param in parameters.items()})
    return losses, gradients, after


def adamw(start, gradients):
    """The parameters after each step."""
    parameters = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=ADAMW["lr"], betas=(ADAMW["beta1"], ADAMW["beta2"]),
                                  eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    after = []
    for step in gradients:
        for key, param in parameters.items():
            param.grad = step[key].clone()
        optimizer.step()
        after.append({key: full(param) for key, param in parameters.items()})
    return after


def require_close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != 2:
        raise SystemExit("run it on 2 ranks")
    torch.manual_seed(1)
    # Larger than those of a training, so that every layer matters.
    start = {key: (1 if key.endswith("gain") else 0) + 0.3 * torch.randn(param.shape)
             for key, param in TWIN.Gpt(**SHAPE).parameters_by_key().items()}
    # A language with something to learn: the next value is the last one times 5 plus 1, or, now and then, any.
    text = torch.randint(SHAPE["values"], (STEPS, SAMPLES, SHAPE["context"] + 1))
    noise = torch.rand(text.shape)
    for place in range(1, SHAPE["context"] + 1):
        follows = (text[:, :, place - 1] * 5 + 1) % SHAPE["values"]
        text[:, :, place] = torch.where(noise[:, :, place] < 0.8, follows, text[:, :, place])
    inputs, targets = text[:, :, :-1], text[:, :, 1:]

    losses, gradients, after = train(start, inputs, targets, ranks, rank, MixedPrecisionPolicy())
    bf16_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    bf16_losses, *_ = train(start, inputs, targets, ranks, rank, bf16_policy)
    serial_losses, serial_gradients, serial_after = train(start, inputs, targets, 1, 0, None)
    require_close(torch.tensor(losses), torch.tensor(serial_losses), "losses")
    for step in range(STEPS):
        for key in start:
            require_close(gradients[step][key], serial_gradients[step][key], f"step {step + 1}, gradient of {key}")
            require_close(after[step][key], serial_after[step][key], f"step {step + 1}, {key}")
    updates = adamw(start, gradients)

    if rank == 0:
        sections = {"start": start}
        for step in range(STEPS):
            sections |= {f"gradient{step + 1}": gradients[step], f"sgd{step + 1}": after[step],
                         f"adamw{step + 1}": updates[step]}
        data = b"".join(section[key].numpy().astype("<f4").tobytes() for section in sections.values() for key in start)
        (FOLDER / "pytorch_gpt.f32").write_bytes(data)
        manifest = {
            "pytorch": torch.__version__, "shape": SHAPE, "samples": SAMPLES, "steps": STEPS, "sgd": SGD,
            "adamw": ADAMW, "sections": list(sections), "inputs": inputs.tolist(), "targets": targets.tolist(),
            "losses": losses, "bf16_losses": bf16_losses,
            "parameters": [{"name": key, "shape": list(value.shape)} for key, value in start.items()]}
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items())
        (FOLDER / "pytorch_gpt.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print("losses", losses, "bf16", bf16_losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
