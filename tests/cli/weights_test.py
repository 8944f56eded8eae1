# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""A published model through fsdp2-ckpt and back: the file that FSDP2_TEST_WEIGHTS names, such as a model.safetensors.

Usage: weights_test.py <fsdp2-ckpt>
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "checkpoints"))

import numpy as np

import read_checkpoint as reader

SKIPPED = 77


def read_safetensors(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], data[8 + length:][slice(*entry["data_offsets"])])
            for name, entry in header.items()}


def main():
    tool = sys.argv[1]
    source = os.environ.get("FSDP2_TEST_WEIGHTS")
    if not source:
        print("skipped: set FSDP2_TEST_WEIGHTS to a safetensors file of a published model")
        return SKIPPED

    def run(*arguments):
        result = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, result.stdout + result.stderr
        print(result.stdout, end="")

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run("import", source, folder / "1", "--world-size=1")
        run("reshard", folder / "1", folder / "8", "--world-size=8")
        run("reshard", folder / "8", folder / "3", "--world-size=3", "--ranks-per-file=2")
        run("reshard", folder / "3", folder / "mesh", "--mesh=dp=2,tp=2")
        run("reshard", folder / "mesh", folder / "last", "--mesh=dp=1")
        run("export", folder / "last", folder / "out.safetensors")
        before, after = read_safetensors(Path(source)), read_safetensors(folder / "out.safetensors")
        assert before == after, "tensors differ: " + ", ".join(sorted(n for n in before if before[n] != after.get(n)))
        digests = [{t.name: t.digest for t in reader.Checkpoint(folder / name).tensors.values()}
                   for name in ("1", "8", "3", "mesh", "last")]
        assert all(d == digests[0] for d in digests), "digests differ"
        floats = [np.frombuffer(data, np.float32) for dtype, _, data in after.values() if dtype == "F32"]
        finite = sum(int(np.isfinite(values).sum()) for values in floats)
        print(f"{len(after)} tensors, {sum(len(data) for *_, data in after.values())} bytes are equal; "
              f"{finite} finite f32 numbers")
    return 0


sys.exit(main())
