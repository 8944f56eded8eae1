#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Reads what write_checkpoint.py wrote with read_checkpoint.py, whole and damaged. The two share no code."""

import contextlib
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
READER = HERE.parent.parent / "checkpoints" / "read_checkpoint.py"
sys.path[:0] = [str(HERE), str(READER.parent)]

import h5py
import numpy as np

import read_checkpoint as reader
import write_checkpoint as writer


def setUpModule():
    TestCase.directory = Path(unittest.enterModuleContext(tempfile.TemporaryDirectory()))
    for name, sample in TestCase.samples.items():
        writer.write(TestCase.directory / name, sample)


class TestCase(unittest.TestCase):
    """Has a directory, and in it one checkpoint of each sample that nobody changes."""

    samples = {name: make() for name, make in writer.SAMPLES.items()}

    def copy(self, name):
        """A copy of a checkpoint, to be damaged."""
        return Path(shutil.copytree(self.directory / name, tempfile.mkdtemp(dir=self.directory) + "/copy"))

    def assert_content(self, checkpoint, tensor):
        array = checkpoint.read(tensor.name)
        self.assertEqual(array.shape, tuple(tensor.shape), tensor.name)
        self.assertEqual(array.tobytes(), writer.content(tensor).tobytes(), tensor.name)

    def assert_invalid(self, path, *words):
        """verify() refuses the checkpoint in a message with all of the words."""
        with self.assertRaises(reader.InvalidCheckpoint) as caught:
            reader.Checkpoint(path).verify()
        for word in words:
            self.assertIn(word, str(caught.exception))


class Digests(unittest.TestCase):

    def test_crc_of_every_length(self):
        data = np.random.default_rng(1).integers(0, 256, (3, 70), dtype=np.uint8)
        self.assertEqual(writer.crc(b"123456789"), 0x995DC9BBDF1939FA)
        for n in range(71):
            expected = [writer.crc(row[:n].tobytes()) for row in data]
            self.assertEqual(reader.crc64(data[:, :n]).tolist(), expected, n)
            self.assertEqual(reader.digest_of(data[0, :n], chunk=16), expected[0], n)

    def test_shift(self):
        for n in (0, 1, 7, 8, 1000):
            self.assertEqual(reader.shift(0x0123456789ABCDEF, n), writer.shift(0x0123456789ABCDEF, n))

    def test_contributions_of_tiles_add_up(self):
        data = np.random.default_rng(2).integers(0, 256, (5, 7, 6, 2), dtype=np.uint8)
        total = 0
        for offset, extent in [((0, 0, 0), (2, 7, 6)), ((2, 0, 0), (3, 4, 6)), ((2, 4, 0), (3, 3, 1)),
                               ((2, 4, 1), (3, 3, 5))]:
            indices = [list(range(o, o + e)) for o, e in zip(offset, extent)]
            piece = data[np.ix_(*indices)].reshape(-1)
            contribution = reader.contribution(piece, (5, 7, 6), offset, extent, 2)
            self.assertEqual(contribution, writer.contribution(data, indices))
            total ^= contribution
        self.assertEqual(total, writer.crc(data.tobytes()))


class Values(unittest.TestCase):

    def test_to_float32(self):
        def check(dtype, kind, bits, expected):
            values = reader.to_float32(np.array(bits, kind), dtype)
            np.testing.assert_array_equal(values, np.array(expected, np.float32))

        check("bf16", "<u2", [0x3F80, 0xC040, 0x7F80, 0x7FC0, 0x0001], [1, -3, math.inf, math.nan, 2.0**-133])
        check("f16", "<f2", [1.5, -2], [1.5, -2])
        check("f8_e5m2", "u1", [0x3C, 0xC0, 0x7C, 0x7E, 0x01, 0x7B], [1, -2, math.inf, math.nan, 2.0**-16, 57344])
        check("f8_e4m3", "u1", [0x38, 0xC0, 0x7E, 0x7F, 0xFF, 0x01, 0x08, 0x80],
              [1, -2, 448, math.nan, math.nan, 2.0**-9, 2.0**-6, -0.0])


class Whole(TestCase):

    def test_every_tensor(self):
        for name, sample in self.samples.items():
            checkpoint = reader.Checkpoint(self.directory / name)
            self.assertEqual(list(checkpoint.tensors), sorted((t.name for t in sample.tensors), key=writer.encoded))
            for tensor in sample.tensors:
                entry = checkpoint.tensors[tensor.name]
                self.assertEqual((entry.dtype, entry.shape), (tensor.dtype, tensor.shape))
                self.assertEqual(entry.digest, writer.crc(writer.content(tensor).tobytes()))
                self.assert_content(checkpoint, tensor)
            checkpoint.verify()

    def test_samples_have_what_they_are_for(self):
        checkpoint = reader.Checkpoint(self.directory / "dp3")
        self.assertEqual({t.dtype for t in checkpoint.tensors.values()}, set(writer.DTYPES))
        for name, tensor in checkpoint.tensors.items():
            if name.startswith("nan."):
                array = checkpoint.read(name)
                if tensor.dtype in ("bf16", "f8_e4m3", "f8_e5m2"):
                    array = reader.to_float32(array, tensor.dtype)
                self.assertTrue(np.isnan(array.real).all() and np.isnan(array.imag).all() or array.dtype.kind == "f"
                                and np.isnan(array).all(), name)
        cut = [name for name, pieces in checkpoint._pieces_of.items() if name.endswith("R") and len(pieces) > 1]
        self.assertTrue(cut, "no replicated tensor is cut among its replicas")

    def test_boxes(self):
        rng = random.Random(3)
        for name in ("dp3", "grid", "mixed"):
            checkpoint = reader.Checkpoint(self.directory / name)
            for tensor in self.samples[name].tensors:
                ends = [sorted((rng.randint(0, n), rng.randint(0, n))) for n in tensor.shape]
                part = checkpoint.read(tensor.name, box=([a for a, _ in ends], [b - a for a, b in ends]))
                whole = writer.content(tensor)
                self.assertEqual(part.tobytes(), whole[tuple(slice(a, b) for a, b in ends)].tobytes(), tensor.name)
        for box in (((0,), (5,)), ((0, 0), (6, 17)), ((-1, 0), (2, 2))):
            with self.assertRaisesRegex(reader.CheckpointError, "f32.5x17.S0"):
                reader.Checkpoint(self.directory / "dp3").read("f32.5x17.S0", box)

    def test_what_the_index_says(self):
        checkpoint = reader.Checkpoint(self.directory / "mixed")
        self.assertEqual((checkpoint.step, checkpoint.world_size, checkpoint.save_id), (-7, 6, writer.SAVE_ID))
        self.assertIsNone(checkpoint.metadata)
        self.assertEqual([(m.name, m.axes, m.sizes, m.ranks) for m in checkpoint.meshes],
                         [("row", ["dp", "tp"], [3, 2], [0, 1, 2, 3, 4, 5]), ("list", ["x"], [5], [4, 0, 5, 2, 3])])
        self.assertEqual(checkpoint.tensors["row.f32.5x17.S0.S0.10"].placements,
                         "row(dp=3: Shard(0), tp=2: Shard(0)) split tp, dp")
        self.assertEqual(checkpoint.tensors["ragged.tp"].placements, "row(dp=3: Replicate, tp=2: Ragged(0, [0, 4, 5]))")
        self.assertEqual([checkpoint.rank_local(rank) for rank in range(6)],
                         [{}, {}, {}, {"a": b"3a", "b": b"3b"}, {"a": b"4"}, {}])
        self.assertEqual(reader.Checkpoint(self.directory / "dp3").metadata, {"lr": 0.5, "text": "\u00e4"})
        with self.assertRaisesRegex(reader.CheckpointError, "no tensor nowhere"):
            checkpoint.read("nowhere")

    def test_same_content_same_digest(self):
        """Samples of other world sizes and meshes, with equal names and so equal bytes."""
        few = [writer.Tensor(f"w.{dtype}", dtype, (5, 17), [("S", 1)], [0]) for dtype in ("f32", "bf16")]
        many = [writer.Tensor(t.name, t.dtype, t.shape, [("S", 0), ("R",)], [1, 0]) for t in few]
        digests = []
        for world, sizes, tensors in ((2, [2], few), (4, [2, 2], many)):
            path = Path(tempfile.mkdtemp(dir=self.directory)) / "checkpoint"
            mesh = writer.Mesh("mesh", ["a", "b"][:len(sizes)], sizes, [0] * len(sizes))
            writer.write(path, writer.Sample(world, [mesh], tensors, [[rank] for rank in range(world)]))
            digests.append([tensor.digest for tensor in reader.Checkpoint(path).tensors.values()])
        self.assertEqual(*digests)


class Damaged(TestCase):

    def flip(self, path, position, bit=0):
        with open(path, "r+b") as file:
            file.seek(position)
            octet = file.read(1)[0]
            file.seek(position)
            file.write(bytes([octet ^ 1 << bit]))

    def datasets(self, path):
        """Path → (offset in the file, bytes) of the datasets that have bytes."""
        found = {}

        def visit(name, item):
            if isinstance(item, h5py.Dataset) and item.size:
                found["/" + name] = item.id.get_offset(), item.id.get_storage_size()

        with h5py.File(path, "r") as file:
            file.visititems(visit)
        return found

    def test_a_flipped_bit_of_any_dataset(self):
        rng = random.Random(5)
        for file in ("index.h5", "shard-00001-of-00002.h5"):
            path = self.copy("mixed") / file
            for name, (offset, size) in self.datasets(path).items():
                for position in {offset + size - 1, offset + rng.randrange(size)}:
                    self.flip(path, position, 5)
                    with self.subTest(file=file, dataset=name), self.assertRaises(reader.CheckpointError) as caught:
                        reader.Checkpoint(path.parent).verify()
                    self.assertIn(file, str(caught.exception))
                    self.flip(path, position, 5)
            reader.Checkpoint(path.parent).verify()

    def test_a_flipped_bit_anywhere(self):
        """It is refused, or it is one of HDF5's unused bytes and all is as before."""
        rng = random.Random(4)
        path, sample = self.copy("grid"), self.samples["grid"]
        refused = 0
        for file in ("index.h5", "shard-00001-of-00004.h5"):
            size = (path / file).stat().st_size
            for _ in range(30):
                position, bit = rng.randrange(size), rng.randrange(8)
                self.flip(path / file, position, bit)
                try:
                    checkpoint = reader.Checkpoint(path)
                    checkpoint.verify()
                    self.assertEqual(checkpoint.step, sample.step)
                    self.assertEqual(list(checkpoint.tensors), sorted(tensor.name for tensor in sample.tensors))
                    self.assert_content(checkpoint, rng.choice(sample.tensors))
                except reader.CheckpointError as error:
                    self.assertIn(file, str(error))
                    refused += 1
                self.flip(path / file, position, bit)
        self.assertGreater(refused, 30)

    def test_damage_is_where_it_is(self):
        """A damaged tensor is named, and others can be read."""
        path = self.copy("dp3")
        piece = reader.Checkpoint(path)._pieces_of["f32.5x17.S0"][1]
        shard = path / "shard-00001-of-00003.h5"
        self.flip(shard, self.datasets(shard)["/data/f32"][0] + piece.start)
        checkpoint = reader.Checkpoint(path)
        with self.assertRaisesRegex(reader.InvalidCheckpoint, "shard-00001-of-00003.h5: tensor f32.5x17.S0: block"):
            checkpoint.read("f32.5x17.S0")
        checkpoint.read("f32.5x17.S0", box=((0, 0), (2, 17)))  # the part in another file
        self.assert_content(checkpoint, next(t for t in self.samples["dp3"].tensors if t.name == "bf16.5x17.S0"))

    def test_truncated(self):
        for file in ("index.h5", "shard-00001-of-00003.h5"):
            for keep in (0, 20, 0.5, -1):
                path = self.copy("dp3")
                size = (path / file).stat().st_size
                os.truncate(path / file, int(size * keep) if keep == 0.5 else keep % size)
                self.assert_invalid(path, file, *(["the index says"] if "shard" in file else []))

    def test_longer(self):
        for file in ("index.h5", "shard-00001-of-00003.h5"):
            path = self.copy("dp3")
            with open(path / file, "ab") as stream:
                stream.write(b"\0")
            self.assert_invalid(path, file, "the index says" if "shard" in file else "superblock")

    def test_missing(self):
        path = self.copy("dp3")
        (path / "shard-00002-of-00003.h5").unlink()
        self.assert_invalid(path, "shard-00002-of-00003.h5", "missing")

    def test_shards_swapped(self):
        sample = writer.Sample(2, [writer.Mesh("mesh", ["dp"], [2], [1])],
                               [writer.Tensor("w", "f32", (4, 3), [("S", 0)], [0])], [[0], [1]])
        path = Path(tempfile.mkdtemp(dir=self.directory)) / "checkpoint"
        writer.write(path, sample)
        first, second = path / "shard-00000-of-00002.h5", path / "shard-00001-of-00002.h5"
        self.assertEqual(first.stat().st_size, second.stat().st_size)
        first.rename(path / "away")
        second.rename(first)
        (path / "away").rename(second)
        self.assert_invalid(path, "shard-00000-of-00002.h5", "shard 1")

    def test_files_of_two_saves(self):
        path = self.copy("dp3")
        other = Path(tempfile.mkdtemp(dir=self.directory)) / "other"
        writer.write(other, self.samples["dp3"], save_id="f" * 32)
        shutil.copy(other / "shard-00001-of-00003.h5", path)
        self.assert_invalid(path, "shard-00001-of-00003.h5", "f" * 32, writer.SAVE_ID)

    def test_unknown_version(self):
        for file in ("index.h5", "shard-00000-of-00003.h5"):
            path = self.copy("dp3")
            self.flip(path / file, self.datasets(path / file)["/header"][0], 1)
            with self.assertRaisesRegex(reader.UnknownVersion, f"{file}: format version 3"):
                reader.Checkpoint(path).verify()

    def test_no_checkpoint(self):
        hidden = self.copy("empty")
        hidden = hidden.rename(hidden.parent / ".step.partial-0")
        for path in (self.directory, self.directory / "nowhere", self.directory / "dp3" / "index.h5", hidden):
            with self.assertRaisesRegex(reader.NoCheckpoint, str(path)):
                reader.Checkpoint(path)

    def test_other_files_do_not_matter(self):
        path = self.copy("dp3")
        for name in ("view.h5", "notes.txt"):
            (path / name).write_bytes(b"not HDF5")
        reader.Checkpoint(path).verify()

    def test_foreign_hdf5_features(self):
        def soft_link(file):
            file.move("/library", "/elsewhere")
            file["/library"] = h5py.SoftLink("/elsewhere")

        def chunked(file):
            del file["/library"]
            file.create_dataset("/library", data=np.zeros(3, "u1"), chunks=(1,))

        def other_type(file):
            del file["/library"]
            file.create_dataset("/library", data=np.zeros(3, "i1"))

        def gone(file):
            del file["/library"]

        words = {soft_link: "hard link", chunked: "contiguous", other_type: "type", gone: "missing"}
        for change, word in words.items():
            path = self.copy("empty")
            with h5py.File(path / "index.h5", "r+") as file:
                change(file)
            self.assert_invalid(path, "index.h5: /library", word)


class Forged(TestCase):
    """Files whose checks match, by a writer that does not follow the rules."""

    def write(self, sample="grid", **changes):
        path = Path(tempfile.mkdtemp(dir=self.directory)) / "checkpoint"
        with contextlib.ExitStack() as stack:
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(writer, name, value))
            writer.write(path, self.samples[sample])
        return path

    def test_honest(self):
        reader.Checkpoint(self.write()).verify()

    def test_wrong_writer_of_a_replicated_box(self):
        right = writer.pieces

        def wrong(rank, tensors, meshes, split):
            return right(rank, tensors, meshes, 1 << 22)

        self.assert_invalid(self.write(pieces=wrong), "shard-00000-of-00004.h5", "rank 0")

    def test_wrong_split_order(self):
        right = writer.box

        def wrong(tensor, mesh, at):
            return right(writer.Tensor(**{**vars(tensor), "split_order": [1, 0]}), mesh, at)

        self.assert_invalid(self.write(box=wrong), "01: /table has another piece")

    def test_wrong_place(self):
        right = writer.up
        self.assert_invalid(self.write(up=lambda value, multiple: right(value, 128 if multiple == 64 else multiple)),
                            "/ranks", "rank 0")

    def test_wrong_row(self):
        right = writer.table_row
        for key in ("arena_start", "bytes", "dtype"):

            def wrong(*arguments):
                row = right(*arguments)
                return {**row, key: row[key] ^ 1}

            self.assert_invalid(self.write(table_row=wrong), "/table has another piece of rank 0")

    def test_wrong_content_digest(self):
        right = writer.write_index

        def wrong(*arguments):
            right(*arguments[:-1], {name: digest ^ 1 for name, digest in arguments[-1].items()})

        path = self.write(write_index=wrong)
        self.assert_invalid(path, "its pieces have the digest")
        with self.assertRaisesRegex(reader.InvalidCheckpoint, "tensor f32.5x17.S0.S0.01: its bytes have the digest"):
            reader.Checkpoint(path).read("f32.5x17.S0.S0.01")

    def test_pieces_that_do_not_tile(self):
        """A writer and a reader who agree on the same wrong rule: rank 3 writes nothing."""
        right, boxes = writer.pieces, reader.Checkpoint._boxes
        path = self.write(pieces=lambda rank, *rest: right(rank, *rest) if rank < 3 else [], check_digests=mock.Mock())
        with mock.patch.object(reader.Checkpoint, "_boxes", lambda self, rank: boxes(self, rank) if rank < 3 else []):
            self.assert_invalid(path, "do not tile")

    def test_pad_that_is_not_zero(self):
        class Poisoned(bytearray):
            def __iadd__(self, data):
                return super().__iadd__(b"\xAA" * len(data) if type(data) is bytes and not any(data) else data)

        self.assert_invalid(self.write(bytearray=Poisoned), "pads", "not zero")

    def test_wrong_digests(self):
        right = writer.contribution
        path = self.write(contribution=lambda data, indices: right(data, indices) ^ 1, check_digests=mock.Mock())
        self.assert_invalid(path, "the piece of rank 0 does not match its digest")


class Program(TestCase):

    def run_reader(self, *arguments):
        result = subprocess.run([sys.executable, "-B", READER, *map(str, arguments)], capture_output=True, timeout=60,
                                text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
        return result.returncode, result.stdout, result.stderr

    def test_help(self):
        status, out, err = self.run_reader("--help")
        self.assertEqual((status, err), (0, ""))
        for option in ("CKPT", "--verify", "--digests", "--tensor NAME", "--out FILE.npy"):
            self.assertIn(option, out)

    def test_lists(self):
        status, out, err = self.run_reader(self.directory / "dp3")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(len(out.splitlines()), len(self.samples["dp3"].tensors))
        tensor = reader.Checkpoint(self.directory / "dp3").tensors["bf16.5x17.S1"]
        line = next(line for line in out.splitlines() if line.startswith("bf16.5x17.S1 "))
        self.assertEqual(line.split(), ["bf16.5x17.S1", "bf16", "[5,", "17]", "mesh(dp=3:", "Shard(1))",
                                        f"{tensor.digest:016x}"])
        self.assertEqual(self.run_reader(self.directory / "empty"), (0, "", ""))

    def test_digests(self):
        status, out, _ = self.run_reader(self.directory / "grid", "--digests")
        expected = [f"{name} {tensor.digest:016x}" for name, tensor in
                    reader.Checkpoint(self.directory / "grid").tensors.items()]
        self.assertEqual((status, out.splitlines()), (0, expected))

    def test_verify(self):
        status, out, err = self.run_reader(self.directory / "mixed", "--verify")
        self.assertEqual((status, len(out.splitlines()), err), (0, 1, ""))
        path = self.copy("mixed")
        (path / "shard-00000-of-00002.h5").unlink()
        status, out, err = self.run_reader(path, "--verify")
        self.assertEqual((status, out, len(err.splitlines())), (1, "", 1))
        status, out, err = self.run_reader(self.directory, "--verify")
        self.assertEqual((status, out, len(err.splitlines())), (2, "", 1))
        self.assertIn("no checkpoint", err)

    def test_tensor(self):
        name = "odd/n\u00e4me %\u2713.S0"
        out = self.directory / "out.npy"
        self.assertEqual(self.run_reader(self.directory / "dp3", "--tensor", name, "--out", out), (0, "", ""))
        tensor = next(t for t in self.samples["dp3"].tensors if t.name == name)
        self.assertEqual(np.load(out).tobytes(), writer.content(tensor).tobytes())
        status, out, _ = self.run_reader(self.directory / "dp3", "--tensor", "nan.bf16.5x17.S1")
        self.assertEqual(status, 0)
        self.assertIn("nan", out)
        self.assertEqual(self.run_reader(self.directory / "dp3", "--tensor", "nowhere")[0], 2)
        self.assertEqual(self.run_reader(self.directory / "dp3", "--out", "x.npy")[0], 2)


if __name__ == "__main__":
    unittest.main()
