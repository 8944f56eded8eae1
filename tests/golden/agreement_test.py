# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Reads what the library writes today with read_checkpoint.py and h5py. Usage: agreement_test.py <make_golden>"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
CHECKPOINTS = Path(__file__).resolve().parent.parent.parent / "checkpoints"
sys.path.insert(0, str(CHECKPOINTS))

import h5py
import numpy as np

import read_checkpoint as reader

MAKE_GOLDEN = sys.argv.pop(1)


class Agreement(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.path = Path(folder.name) / "written"
        subprocess.run([MAKE_GOLDEN, cls.path], check=True, timeout=60)
        cls.written = reader.Checkpoint(cls.path)
        cls.golden = reader.Checkpoint(CHECKPOINTS / "golden" / "dp3-uneven")

    def test_every_byte_is_valid(self):
        self.written.verify()

    def test_tensors_are_those_of_the_golden_file(self):
        self.assertEqual(list(self.written.tensors), list(self.golden.tensors))
        for name, tensor in self.golden.tensors.items():
            self.assertEqual(self.written.tensors[name].digest, tensor.digest, name)
            self.assertEqual(self.written.tensors[name].placements, tensor.placements)
            self.assertEqual(self.written.read(name).tobytes(), self.golden.read(name).tobytes(), name)

    def test_nan_payloads_survive(self):
        for dtype, kind, quiet in (("f64", "<u8", 51), ("f32", "<u4", 22), ("f16", "<u2", 9), ("bf16", "<u2", 6)):
            array = self.written.read(f"every.{dtype}").reshape(-1)
            values = reader.to_float32(array, dtype) if dtype == "bf16" else array
            self.assertTrue(np.isnan(values[1::3]).all(), dtype)
            bits = array.view(kind)[1::3]
            self.assertEqual(len(set(bits.tolist())), 5, f"{dtype}: payloads differ")
            self.assertEqual(len(set((bits >> np.array(quiet, kind) & 1).tolist())), 2, f"{dtype}: quiet and signalling")

    def test_what_a_person_sees_with_h5py(self):
        """/tensors has every piece under its escaped name; HDF5's view of it has the right bytes."""
        names = {}
        for g, (pieces, _) in enumerate(self.written.pieces):
            with h5py.File(self.path / f"shard-{g:05}-of-00003.h5") as file:
                self.assertEqual(file.attrs["step"], 100)
                self.assertEqual(file.attrs["save_id"].decode(), self.written.save_id)
                self.assertEqual(len(file["tensors"]), len(pieces))
                for piece in pieces:
                    escaped = piece.tensor.name.replace("%", "%25").replace("/", "%2F")
                    view = file["tensors"][escaped]
                    self.assertEqual(view.shape, tuple(piece.extent) or (1,), escaped)
                    names.setdefault(piece.tensor.name, []).append(g)
                    if piece.tensor.dtype in ("f32", "i64", "u8", "f8_e4m3", "complex128", "bool"):
                        expected = self.written.read(piece.tensor.name, (piece.offset, piece.extent))
                        self.assertEqual(view[...].tobytes(), expected.tobytes(), escaped)
        self.assertEqual(names["rows"], [0, 1, 2])
        self.assertEqual(names["replicated"], [1, 2], "cut among its replicas")
        self.assertNotIn("empty", names)
        self.assertEqual(set(names) | {"empty"}, set(self.written.tensors))


if __name__ == "__main__":
    unittest.main()
