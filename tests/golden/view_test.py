# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Reads view.h5 of copies of the golden checkpoints with h5py. Usage: view_test.py <fsdp2-ckpt>"""

import json
import resource
import shutil
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

TOOL = sys.argv.pop(1)
GOLDEN = sorted(path for path in (CHECKPOINTS / "golden").iterdir())


def escaped(name):
    """FORMAT.md §9, another way than the library's."""
    def escape(character, is_first):
        plain = character.isascii() and character >= " " and character not in "/%\x7f" and not (is_first and character == ".")
        if plain or character >= "\x80" and not "\udc80" <= character <= "\udcff":
            return character
        return "".join(f"%{octet:02X}" for octet in character.encode("utf-8", "surrogateescape"))
    return "".join(escape(character, i == 0) for i, character in enumerate(name))


def bits(dataset, dtype):
    """The stored bits: HDF5 would convert bf16 and f16, and with them payloads of NaN."""
    array = np.empty(dataset.shape, dtype)
    dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, array, mtype=dataset.id.get_type())
    return array


class View(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def copy(self, name):
        return Path(shutil.copytree(CHECKPOINTS / "golden" / name, self.folder / name))

    def view(self, path, *arguments, status=0, **keywords):
        result = subprocess.run([TOOL, "view", path, *arguments], capture_output=True, text=True, timeout=60, **keywords)
        self.assertEqual(result.returncode, status, result.stderr)
        return result

    def assert_shows(self, path, checkpoint):
        with h5py.File(path / "view.h5") as file:
            self.assertEqual(sorted(file), sorted(map(escaped, checkpoint.tensors)))
            for name, tensor in checkpoint.tensors.items():
                dataset = file[escaped(name)]
                self.assertEqual(dataset.shape, tensor.shape or (1,), name)
                if dataset.size:
                    expected = checkpoint.read(name)
                    self.assertEqual(bits(dataset, expected.dtype).tobytes(), expected.tobytes(), name)

    def test_every_tensor_of_every_golden_checkpoint(self):
        self.assertGreaterEqual(len(GOLDEN), 4)
        for golden in GOLDEN:
            with self.subTest(golden.name):
                path = self.copy(golden.name)
                self.view(path)
                self.assert_shows(path, reader.Checkpoint(golden))
                reader.Checkpoint(path).verify()

    def test_what_it_says_of_itself(self):
        path = self.copy("simulation-6")
        report = json.loads(self.view(path, "--json").stdout)
        pieces = sum(len(pieces) for pieces, _ in reader.Checkpoint(path).pieces)
        self.assertEqual(report, {"checkpoint": str(path), "view": f"{path}/view.h5", "tensors": 3, "mappings": pieces})
        with h5py.File(path / "view.h5") as file:
            self.assertEqual(file.attrs["step"], -7)
            self.assertIn(b"index.h5", file.attrs["note"])
        self.assertEqual(self.view(path, "--quiet").stdout, "")
        self.assertEqual(self.view(path).stdout, f"{path}/view.h5: 3 tensors from {pieces} pieces\n")

    def test_the_directory_can_be_moved(self):
        path = self.copy("tensor-parallel-2x2")
        self.view(path)
        moved = path.rename(self.folder / "moved")
        self.assert_shows(moved, reader.Checkpoint(moved))

    def test_what_a_missing_file_looks_like(self):
        """HDF5 says nothing: this is why programs do not read views."""
        path = self.copy("hybrid-2x2")
        checkpoint = reader.Checkpoint(path)
        whole = checkpoint.read("weight")
        self.view(path)
        pieces = [piece for rank in range(4) for piece in checkpoint.pieces[rank][0] if piece.tensor.name == "weight"]
        first = pieces[0]
        (path / f"shard-{first.file:05}-of-00004.h5").unlink()
        missing = np.zeros(whole.shape, bool)
        missing[tuple(slice(o, o + e) for o, e in zip(first.offset, first.extent))] = True
        self.assertFalse(missing.all())
        with h5py.File(path / "view.h5") as file:
            shown = file["weight"][...]
        self.assertTrue(np.isnan(shown[missing]).all())
        self.assertEqual(shown[~missing].tobytes(), whole[~missing].tobytes())

    def test_failure_leaves_the_old_view(self):
        path = self.copy("hybrid-2x2")
        self.view(path)
        before = (path / "view.h5").read_bytes()
        files = sorted(path.iterdir())
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        self.assertIn("RLIMIT_FSIZE", self.view(path, status=3, preexec_fn=limit).stderr)
        self.assertEqual((path / "view.h5").read_bytes(), before)
        self.assertEqual(sorted(path.iterdir()), files)

    def test_what_a_killed_one_leaves(self):
        path = self.copy("hybrid-2x2")
        (path / ".view.h5.partial-0123").write_bytes(b"half")
        reader.Checkpoint(path).verify()
        self.view(path)
        self.assertEqual([name for name in path.iterdir() if name.name.startswith(".")], [])

    def test_no_checkpoint(self):
        self.assertIn("index.h5", self.view(self.folder, status=2).stderr)
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
