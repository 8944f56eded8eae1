# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Reads golden checkpoints, and those of the library of today, with read_checkpoint.py and h5py.

Usage: agreement_test.py <make_golden>
"""

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
        folder = Path(folder.name) / "written"
        subprocess.run([MAKE_GOLDEN, folder], check=True, timeout=60)
        names = sorted(path.name for path in folder.iterdir())
        cls.pairs = {name: (reader.Checkpoint(folder / name), reader.Checkpoint(CHECKPOINTS / "golden" / name))
                     for name in names}
        cls.path = folder / "dp3-uneven"
        cls.written = cls.pairs["dp3-uneven"][0]

    def test_every_byte_is_valid(self):
        self.assertGreaterEqual(len(self.pairs), 4)
        for pair in self.pairs.values():
            for checkpoint in pair:
                checkpoint.verify()

    def test_checkpoints_are_the_golden_ones(self):
        for path, (written, golden) in self.pairs.items():
            with self.subTest(path):
                self.assertEqual(list(written.tensors), list(golden.tensors))
                for what in ("step", "save_id", "world_size", "metadata", "file_ranks"):
                    self.assertEqual(getattr(written, what), getattr(golden, what), what)
                for name, tensor in golden.tensors.items():
                    self.assertEqual(written.tensors[name].digest, tensor.digest, name)
                    self.assertEqual(written.tensors[name].placements, tensor.placements)
                    self.assertEqual(written.read(name).tobytes(), golden.read(name).tobytes(), name)
                for rank in range(golden.world_size):
                    self.assertEqual(written.rank_local(rank), golden.rank_local(rank))

    def test_what_python_sees_in_the_golden_files(self):
        simulation = self.pairs["simulation-6"][1]
        self.assertEqual((simulation.step, simulation.metadata), (-7, {"time": 0.5}))
        self.assertEqual([simulation.rank_local(rank) for rank in range(6)],
                         [{}, {"data": b"epoch 3", "rng": b"\0one"}, {}, {}, {"rng": b""}, {}])
        self.assertEqual(simulation.tensors["particles"].placements, "particles(p=4: Ragged(0, [0, 4, 4, 5, 9]))")
        self.assertEqual(simulation.meshes[2].ranks, [5, 0, 3, 2])
        parallel = self.pairs["tensor-parallel-2x2"][1]
        self.assertEqual(parallel.file_ranks, [[0, 1], [2, 3]])
        self.assertEqual(parallel.tensors["row.weight"].placements, "mesh(dp=2: Shard(0), tp=2: Shard(1)) split tp, dp")

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
