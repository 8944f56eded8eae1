# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Runs fsdp2-ckpt on checkpoints that it did not write. Usage: fsdp2_ckpt_test.py <fsdp2-ckpt>"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "checkpoints"), str(ROOT / "tests" / "golden")]

import h5py

import read_checkpoint as reader
import write_checkpoint as writer

TOOL = sys.argv.pop(1)


class ToolTest(unittest.TestCase):
    """Has one checkpoint of each sample, which nobody changes, and a folder of its own."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.samples = Path(folder.name)
        for name in cls.needs:
            writer.write(cls.samples / name, writer.SAMPLES[name]())

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def tool(self, *arguments):
        return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)

    def expect(self, status, *arguments, out=(), err=()):
        """Runs the tool; its status, and parts of what it printed. What fails says so in one place and nothing else."""
        result = self.tool(*arguments)
        self.assertEqual(result.returncode, status, result.stdout + result.stderr)
        for part in out:
            self.assertIn(part, result.stdout)
        for part in err:
            self.assertIn(part, result.stderr)
        if not out and status in (2, 3):
            self.assertEqual(result.stdout, "")
        if not err:
            self.assertEqual(result.stderr, "")
        self.assertNotIn("HDF5-DIAG", result.stderr)
        return result

    def copy(self, name):
        """To be damaged."""
        return Path(shutil.copytree(self.samples / name, self.folder / "damaged"))

    def names(self):
        return sorted(os.listdir(self.folder))


def dataset(path, name):
    """Where a dataset lies in its file: offset, bytes."""
    with h5py.File(path, "r") as file:
        return file[name].id.get_offset(), file[name].id.get_storage_size()


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        octet = file.read(1)[0]
        file.seek(position)
        file.write(bytes([octet ^ 16]))


def flip_tensor(checkpoint, name):
    """Flips a bit of the first piece of a tensor; returns the name of its shard file."""
    piece = reader.Checkpoint(checkpoint)._pieces_of[name][0]
    shard = checkpoint / f"shard-{piece.file:05}-of-{len(reader.Checkpoint(checkpoint).file_ranks):05}.h5"
    offset, _ = dataset(shard, f"/data/{piece.tensor.dtype}")
    flip(shard, offset + piece.start)
    return shard.name


def swap(a, b):
    a.rename(a.parent / "away")
    b.rename(a)
    (a.parent / "away").rename(b)


def set_version(path, version):
    offset, _ = dataset(path, "/header")
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes([version]))


class Usage(ToolTest):
    needs = ["empty"]

    def test_help(self):
        result = self.expect(0, "--help", out=["inspect", "verify", "reshard", "Exit status: 0"])
        self.assertIn("unreadable input", result.stdout)
        for command in ("inspect", "verify", "reshard"):
            self.expect(0, command, "--help", out=[command])

    def test_version(self):
        self.assertRegex(self.expect(0, "--version", out=["fsdp2-ckpt"]).stdout, r"^fsdp2-ckpt \d+\.\d+\.\d+\n")

    def test_wrong_usage(self):
        sample = self.samples / "empty"
        self.expect(2, err=["subcommand"])
        self.expect(2, "--frobnicate", err=["subcommand"])
        self.expect(2, "inspect", err=["CKPT"])
        self.expect(2, "verify", err=["CKPT"])
        self.expect(2, "inspect", sample, "--frobnicate", err=["--frobnicate"])
        self.expect(2, "inspect", sample, "too-much", err=["too-much"])
        self.expect(2, "reshard", sample, err=["DST"])
        self.expect(2, "reshard", sample, self.folder / "out", err=["--world-size"])
        self.assertEqual(self.names(), [])


class Inspect(ToolTest):
    needs = ["dp3", "mixed", "empty"]

    def test_what_it_says(self):
        result = self.expect(0, "inspect", self.samples / "dp3", out=[writer.SAVE_ID, "write_checkpoint.py", '"lr": 0.5'])
        for line in (r"step +100", r"ranks +3", r"files +3", r"mesh +mesh \(dp=3\)"):
            self.assertRegex(result.stdout, line)
        result = self.expect(0, "inspect", self.samples / "mixed", out=["row (dp=3,tp=2)", "list (x=5)"])
        self.assertRegex(result.stdout, r"step +-7\n")
        self.expect(0, "inspect", self.samples / "empty", "--tensors", out=[writer.SAVE_ID])

    def test_tensors(self):
        for name in ("dp3", "mixed"):
            result = self.expect(0, "inspect", self.samples / name, "--tensors", out=["digest"])
            tensors = reader.Checkpoint(self.samples / name).tensors
            self.assertGreater(len(tensors), 20)
            lines = result.stdout.splitlines()[-len(tensors):]
            for line, tensor in zip(lines, tensors.values(), strict=True):
                for part in (tensor.name, tensor.dtype, str(list(tensor.shape)), f"{tensor.digest:016x}"):
                    self.assertIn(part, line)

    def test_reads_the_index_only(self):
        path = self.copy("dp3")
        for shard in path.glob("shard-*"):
            shard.unlink()
        self.expect(0, "inspect", path, out=[writer.SAVE_ID])

    def test_no_checkpoint(self):
        self.expect(2, "inspect", self.folder / "nowhere", err=["nowhere", "not a directory"])
        self.expect(2, "inspect", self.folder, err=["not a checkpoint"])
        path = self.copy("empty")
        os.truncate(path / "index.h5", 3000)
        self.expect(2, "inspect", path, err=["index.h5", "truncated"])

    def test_unfinished_checkpoint(self):
        path = self.copy("empty").rename(self.folder / ".step-1.partial-0")
        self.expect(2, "inspect", path, err=["unfinished"])


class Verify(ToolTest):
    needs = ["dp3", "grid", "mixed", "empty"]

    def damage(self, *parts, checkpoint):
        return self.expect(1, "verify", checkpoint, out=["INVALID"], err=parts)

    def test_valid(self):
        for name in self.needs:
            self.expect(0, "verify", self.samples / name, out=[": valid"])
            self.expect(0, "verify", self.samples / name, "--quick", out=["valid", "tables and sizes only"])
            result = self.expect(0, "verify", self.samples / name, "--quiet")
            self.assertEqual(result.stdout, "")

    def test_no_checkpoint(self):
        self.expect(2, "verify", self.folder / "nowhere", err=["nowhere", "not a directory"])
        self.expect(2, "verify", self.folder, err=[str(self.folder), "not a checkpoint"])
        self.expect(2, "verify", __file__, err=["not a directory"])
        hidden = self.copy("empty").rename(self.folder / ".step-1.trash-0")
        self.expect(2, "verify", hidden, err=["not a checkpoint"])

    def test_missing_shard(self):
        path = self.copy("dp3")
        (path / "shard-00001-of-00003.h5").unlink()
        result = self.damage("shard-00001-of-00003.h5", "No such file", checkpoint=path)
        self.assertIn("2 of 3 files", result.stdout)

    def test_truncated_shard(self):
        for keep in (0, 20, 5000, -1):
            path = self.copy("dp3")
            shard = path / "shard-00002-of-00003.h5"
            os.truncate(shard, keep % shard.stat().st_size)
            self.damage("shard-00002-of-00003.h5", checkpoint=path)
            shutil.rmtree(path)

    def test_every_bad_file_is_named(self):
        path = self.copy("dp3")
        (path / "shard-00000-of-00003.h5").unlink()
        os.truncate(path / "shard-00002-of-00003.h5", 100)
        result = self.damage("shard-00000-of-00003.h5", "shard-00002-of-00003.h5", checkpoint=path)
        self.assertNotIn("shard-00001", result.stderr)

    def test_swapped_shards(self):
        path = self.copy("grid")
        swap(path / "shard-00000-of-00004.h5", path / "shard-00003-of-00004.h5")
        self.damage("shard-00000-of-00004.h5", "shard-00003-of-00004.h5", checkpoint=path)

    def test_swapped_shards_of_equal_size(self):
        sample = writer.Sample(2, [writer.Mesh("mesh", ["dp"], [2], [1])],
                               [writer.Tensor("w", "f32", (4, 3), [("S", 0)], [0])], [[0], [1]])
        path = self.folder / "checkpoint"
        writer.write(path, sample)
        swap(path / "shard-00000-of-00002.h5", path / "shard-00001-of-00002.h5")
        self.damage("shard-00000-of-00002.h5", "swapped", checkpoint=path)

    def test_mixed_saves(self):
        writer.write(self.folder / "other", writer.SAMPLES["dp3"](), save_id="f" * 32)
        path = self.copy("dp3")
        shutil.copy(self.folder / "other" / "shard-00001-of-00003.h5", path)
        self.damage("shard-00001-of-00003.h5", "f" * 32, writer.SAVE_ID, "mixed", checkpoint=path)

    def test_flipped_data(self):
        path = self.copy("dp3")
        shard = flip_tensor(path, "f32.5x17.S0")
        self.damage(shard, "f32 data", "block 0", checkpoint=path)
        self.expect(0, "verify", path, "--quick", out=["valid"])

    def test_flipped_data_in_a_file_of_several_ranks(self):
        path = self.copy("mixed")
        shard = flip_tensor(path, "ragged.dp")
        self.damage(shard, "f64 data", checkpoint=path)

    def test_flipped_tables(self):
        for file in ("shard-00000-of-00002.h5", "shard-00001-of-00002.h5"):
            for name in ("/header", "/ranks", "/table/offset", "/table/digest", "/blocks/f32", "/rank_local/value_bytes", "/check"):
                path = self.copy("mixed")
                offset, size = dataset(path / file, name)
                flip(path / file, offset + size - 1)
                self.damage(file, checkpoint=path)
                shutil.rmtree(path)

    def test_flipped_index(self):
        for name in ("/table/digest", "/table/name_bytes", "/files/size", "/metadata", "/check"):
            path = self.copy("dp3")
            offset, _ = dataset(path / "index.h5", name)
            flip(path / "index.h5", offset)
            self.expect(1, "verify", path, err=["index.h5", "/check"])
            shutil.rmtree(path)

    def test_forged_content_digest(self):
        """An index that is sound in itself, but has the digest of another tensor."""
        right = writer.write_index

        def wrong(*arguments):
            right(*arguments[:-1], {**arguments[-1], "f32.5x17.S0": 1})

        try:
            writer.write_index = wrong
            writer.write(self.folder / "forged", writer.SAMPLES["dp3"]())
        finally:
            writer.write_index = right
        self.damage("f32.5x17.S0", "0000000000000001", checkpoint=self.folder / "forged")

    def test_newer_version(self):
        path = self.copy("dp3")
        set_version(path / "index.h5", 2)
        for command in ("verify", "inspect"):
            self.expect(2, command, path, err=["format version 2", "version 1", "newer fsdp2"])
        self.expect(2, "reshard", path, self.folder / "out", "--world-size", 2, err=["format version 2"])
        self.assertEqual(self.names(), ["damaged"])


class Reshard(ToolTest):
    needs = ["dp3", "grid", "mixed"]

    def test_to_other_numbers_of_ranks(self):
        """Valid, and equal in all bits, by this tool and by another program."""
        source = reader.Checkpoint(self.samples / "dp3")
        for ranks in (1, 2, 5, 12):
            target = self.folder / f"to{ranks}"
            self.expect(0, "reshard", self.samples / "dp3", target, "--world-size", ranks, "--memory", "4KiB",
                        out=["3 ranks", f"{ranks} ranks", "all content digests equal"])
            self.assertEqual(self.names(), [target.name])
            self.expect(0, "verify", target, out=[": valid"])
            checkpoint = reader.Checkpoint(target)
            checkpoint.verify()
            self.assertEqual((checkpoint.world_size, len(checkpoint.file_ranks)), (ranks, ranks))
            self.assertEqual((checkpoint.step, checkpoint.metadata), (source.step, source.metadata))
            self.assertNotEqual(checkpoint.save_id, source.save_id)
            self.assertEqual(list(checkpoint.tensors), list(source.tensors))
            for sample in writer.SAMPLES["dp3"]().tensors:
                self.assertEqual(checkpoint.tensors[sample.name].digest, source.tensors[sample.name].digest, sample.name)
                self.assertEqual(checkpoint.read(sample.name).tobytes(), writer.content(sample).tobytes(), sample.name)
            shutil.rmtree(target)

    def test_there_and_back(self):
        self.expect(0, "reshard", self.samples / "dp3", self.folder / "a", "--world-size", 7, out=["7 ranks"])
        self.expect(0, "reshard", self.folder / "a", self.folder / "b", "--world-size", 3, out=["3 ranks"])
        self.assertEqual({t.name: t.digest for t in reader.Checkpoint(self.folder / "b").tensors.values()},
                         {t.name: t.digest for t in reader.Checkpoint(self.samples / "dp3").tensors.values()})

    def test_two_axes(self):
        """dp shards and is rescaled; tp keeps its size."""
        self.expect(0, "reshard", self.samples / "grid", self.folder / "out", "--world-size", 6, out=["dp=2,tp=2 -> dp=3,tp=2"])
        checkpoint = reader.Checkpoint(self.folder / "out")
        checkpoint.verify()
        for tensor in writer.SAMPLES["grid"]().tensors:
            self.assertEqual(checkpoint.read(tensor.name).tobytes(), writer.content(tensor).tobytes(), tensor.name)

    def test_meshes_in_files_of_several_ranks(self):
        """Two meshes, a rank list, files that hold three ranks each, ragged cuts: all of it becomes plain."""
        self.expect(0, "reshard", self.samples / "mixed", self.folder / "out", "--world-size", 4, "--memory", "4KiB",
                    out=["dp=3,tp=2 -> dp=2,tp=2", "x=5 -> x=4"])
        checkpoint = reader.Checkpoint(self.folder / "out")
        checkpoint.verify()
        for tensor in writer.SAMPLES["mixed"]().tensors:
            self.assertEqual(checkpoint.read(tensor.name).tobytes(), writer.content(tensor).tobytes(), tensor.name)

    def test_a_mesh_that_cannot_have_so_many_ranks(self):
        self.expect(2, "reshard", self.samples / "grid", self.folder / "out", "--world-size", 3, err=["dp=2,tp=2", "3 ranks", "2"])
        self.expect(2, "reshard", self.samples / "mixed", self.folder / "out", "--world-size", 5, err=["dp=3,tp=2"])
        self.assertEqual(self.names(), [])

    def test_wrong_numbers(self):
        for value in ("0", "-1", "abc", "1.5", "99999999999999999999", ""):
            self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", f"--world-size={value}", err=["--world-size"])
        for value in ("abc", "4Kix", "-1"):
            self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", "--world-size=2", f"--memory={value}",
                        err=["--memory"])
        self.assertEqual(self.names(), [])

    def test_target_exists(self):
        for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")):
            target = self.folder / "out"
            make(target)
            before = target.lstat()
            self.expect(2, "reshard", self.samples / "dp3", target, "--world-size", 2, err=[str(target), "already exists"])
            self.assertEqual(target.lstat(), before)
            self.assertEqual(self.names(), ["out"])
            target.rmdir() if target.is_dir() else target.unlink()

    def test_target_that_cannot_be_made(self):
        (self.folder / "file").touch()
        self.expect(3, "reshard", self.samples / "dp3", self.folder / "file" / "out", "--world-size", 2, err=["file"])
        self.expect(2, "reshard", self.samples / "dp3", self.folder / ".out", "--world-size", 2, err=["begins with '.'"])
        self.assertEqual(self.names(), ["file"])

    def test_source_is_no_checkpoint(self):
        self.expect(2, "reshard", self.folder, self.folder / "out", "--world-size", 2, err=["not a checkpoint"])
        self.expect(2, "reshard", self.folder / "nowhere", self.folder / "out", "--world-size", 2, err=["not a directory"])
        self.assertEqual(self.names(), [])

    def test_damaged_source(self):
        """Found while working: nothing is published, and nothing stays."""
        path = self.copy("dp3")
        shard = flip_tensor(path, "f32.5x17.S0")
        self.expect(3, "reshard", path, self.folder / "out", "--world-size", 2, err=[shard, "f32"])
        self.assertEqual(self.names(), ["damaged"])
        shutil.rmtree(path)
        path = self.copy("dp3")
        (path / "shard-00001-of-00003.h5").unlink()
        self.expect(3, "reshard", path, self.folder / "out", "--world-size", 2, err=["shard-00001-of-00003.h5"])
        self.assertEqual(self.names(), ["damaged"])

    def test_quiet(self):
        result = self.expect(0, "reshard", self.samples / "dp3", self.folder / "out", "--world-size", 2, "--quiet")
        self.assertEqual(result.stdout, "")
        self.assertEqual(self.names(), ["out"])


del ToolTest


if __name__ == "__main__":
    unittest.main()
