# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""fsdp2-ckpt under an MPI launcher. Usage: mpi_test.py <fsdp2-ckpt> <mpirun and its flags, without the number of ranks>"""

import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "checkpoints"))

import h5py

import read_checkpoint as reader

TOOL, *LAUNCHER = sys.argv[1:]
del sys.argv[1:]
GOLDEN = ROOT / "checkpoints" / "golden"


class UnderMpi(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def tool(self, processes, *arguments, status=0):
        command = [*LAUNCHER, str(processes)] if processes else []
        result = subprocess.run([*command, TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        return result

    def test_shares_the_files(self):
        """As one process does it, byte for byte but for the save id; more processes than files, too."""
        cases = ((1, "dp3-uneven", ["--world-size=8"]), (3, "dp3-uneven", ["--world-size=8", "--ranks-per-file=3"]),
                 (4, "hybrid-2x2", ["--mesh=replicate=1,dp=7", "--cast=weight=bf16"]), (4, "names", ["--world-size=2"]),
                 (2, "simulation-6", ["--mesh=grid:x=3,y=2", "--mesh=particles:p=6", "--world-size=6", "--ranks-per-file=2"]))
        for processes, name, arguments in cases:
            with self.subTest(name=name, processes=processes):
                alone, shared = self.folder / "alone", self.folder / "shared"
                self.tool(None, "reshard", GOLDEN / name, alone, *arguments)
                text = self.tool(processes, "reshard", GOLDEN / name, shared, *arguments).stdout
                self.assertEqual(text.count("content digests equal"), 1)
                a, b = reader.Checkpoint(alone), reader.Checkpoint(shared)
                b.verify()
                self.assertEqual((a.file_ranks, a.segments), (b.file_ranks, b.segments))
                self.assertEqual({t.name: (t.digest, t.placements) for t in a.tensors.values()},
                                 {t.name: (t.digest, t.placements) for t in b.tensors.values()})
                for rank in range(a.world_size):
                    self.assertEqual(a.rank_local(rank), b.rank_local(rank))
                self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["alone", "shared"])
                shutil.rmtree(alone)
                shutil.rmtree(shared)

    def test_errors_are_one(self):
        source = Path(shutil.copytree(GOLDEN / "dp3-uneven", self.folder / "source"))
        target = self.folder / "target"
        result = self.tool(3, "reshard", source, source, "--world-size=5", status=2)
        self.assertEqual(result.stderr.count("already exists"), 1)
        self.assertEqual(self.tool(3, "reshard", source, target, "--world-size=0", status=2).stderr.count("--world-size"), 1)
        shard = source / "shard-00001-of-00003.h5"
        data = bytearray(shard.read_bytes())
        offset = next(piece.start for piece in reader.Checkpoint(source).pieces[1][0] if piece.tensor.name == "rows")
        with h5py.File(shard) as file:
            arena = file["/data/f32"].id.get_offset()
        data[arena + offset] ^= 1
        shard.write_bytes(data)
        result = self.tool(3, "reshard", source, target, "--world-size=5", status=3)
        self.assertEqual(result.stderr.count(shard.name), 1)
        self.assertIn("CRC", result.stderr)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["source"])

    def test_other_subcommands_run_once(self):
        path = GOLDEN / "hybrid-2x2"
        self.assertEqual(self.tool(3, "verify", path).stdout, self.tool(None, "verify", path).stdout)
        self.assertEqual(json.loads(self.tool(2, "inspect", path, "--json").stdout)["world_size"], 4)
        self.tool(2, "export", path, self.folder / "f", "--include=weight")
        self.assertEqual(self.tool(2, "verify", self.folder, status=2).stderr.count("not a checkpoint"), 1)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["f"])


if __name__ == "__main__":
    unittest.main()
