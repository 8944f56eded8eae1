# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Reads the checkpoints of matrix_test.cpp with read_checkpoint.py: all are valid, and all have the same tensors.

Usage: matrix_check.py <folder> <number of checkpoints>. Removes the folder if all is well.
"""

import shutil
import sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "checkpoints"))

import read_checkpoint as reader


def main():
    folder, expected = Path(sys.argv[1]), int(sys.argv[2])
    paths = sorted(folder.iterdir())
    assert len(paths) == expected, f"{folder} has {len(paths)} checkpoints: expected {expected}"
    first = None
    for path in paths:
        checkpoint = reader.Checkpoint(path)
        checkpoint.verify()
        content = {name: (tensor.digest, checkpoint.read(name).tobytes()) for name, tensor in checkpoint.tensors.items()}
        first = first or content
        assert len(content) == 6 and content == first, f"{path} and {paths[0]} differ"
    shutil.rmtree(folder)
    print(f"{len(paths)} checkpoints are valid and equal")


main()
