# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Runs fsdp2-ckpt on checkpoints that it did not write. Usage: fsdp2_ckpt_test.py <fsdp2-ckpt>"""

import html
import html.parser
import json
import math
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
import numpy as np

import read_checkpoint as reader
import write_checkpoint as writer

TOOL = sys.argv.pop(1)
COMMANDS = ("inspect", "verify", "reshard", "diff", "list", "prune", "export", "import", "view")


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

    def document(self, *arguments, status=0):
        """What the tool prints with --json: one document in ASCII."""
        text = self.expect(status, *arguments, "--json").stdout
        self.assertTrue(text.isascii() and text.replace("\n", "").isprintable())
        return json.loads(text)

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


def write_values(path, values, world_size=2, step=100, save_id=writer.SAVE_ID, metadata=None, mesh="mesh", rank_local={}):
    """A checkpoint of arrays, by name: their dtype is numpy's, or "bf16" for ("bf16", uint16 array). Dimension 0 is sharded."""
    kinds = {"float64": "f64", "float32": "f32", "float16": "f16", "complex64": "complex64", "int64": "i64", "uint64": "u64"}
    arrays = {name: value if isinstance(value, tuple) else (kinds[value.dtype.name], value) for name, value in values.items()}
    tensors = [writer.Tensor(name, kind, array.shape, [("S", 0) if array.ndim else writer.REPLICATE], [0])
               for name, (kind, array) in arrays.items()]
    sample = writer.Sample(world_size, [writer.Mesh(mesh, ["dp"], [world_size], [1])], tensors,
                           [[rank] for rank in range(world_size)], step=step, metadata=metadata, rank_local=dict(rank_local))
    right = writer.content
    try:
        writer.content = lambda tensor: np.frombuffer(arrays[tensor.name][1].tobytes(), "u1").reshape(
            *tensor.shape, tensor.itemsize)
        writer.write(path, sample, save_id)
    finally:
        writer.content = right
    return Path(path)


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
        result = self.expect(0, "--help", out=[*COMMANDS, "Exit status: 0"])
        self.assertIn("unreadable input", result.stdout)
        for command in COMMANDS:
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
        self.expect(2, "diff", sample, err=["B"])
        self.expect(2, "list", err=["ROOT"])
        self.expect(2, "prune", self.folder, err=["--keep-last"])
        self.expect(2, "reshard", sample, self.folder / "out", err=["--world-size"])
        self.assertEqual(self.names(), [])


class Documents(ToolTest):
    """The man page and the completion are files of the source, so that packages need not run what they build."""
    needs = []
    source = ROOT / "tools" / "fsdp2-ckpt"

    def test_are_what_the_tool_says(self):
        for option, file in (("--man", "fsdp2-ckpt.1"), ("--bash-completion", "fsdp2-ckpt.bash")):
            self.assertEqual(self.tool(option).stdout, (self.source / file).read_text(), f"write {file} by fsdp2-ckpt {option}")

    def test_page_has_every_option(self):
        page = (self.source / "fsdp2-ckpt.1").read_text().replace("\\-", "-")
        count = 0
        for command in COMMANDS:
            section = page.split(f".SS {command} ")[1].split("\n.S")[0]
            for option in re.findall(r"--[a-z-]+", self.expect(0, command, "--help", out=["Usage"]).stdout):
                self.assertRegex(section, rf"(?m)^\.B .*{option}\b")
                count += 1
        self.assertGreater(count, 40)
        for line in page.splitlines():
            self.assertRegex(line, r"^(\.\\\"|\.(TH|SH|SS|TP|B|br)\b|[^.'])")

    def test_completion(self):
        def complete(*words):
            script = (f"source {self.source / 'fsdp2-ckpt.bash'}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
                      "_fsdp2_ckpt; printf '%s\\n' \"${COMPREPLY[@]}\"")
            result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=self.folder)
            self.assertEqual((result.returncode, result.stderr), (0, ""))
            return result.stdout.split()

        (self.folder / "step-1").mkdir()
        self.assertEqual(complete("fsdp2-ckpt", "in"), ["inspect"])
        self.assertEqual(complete("fsdp2-ckpt", "''")[:len(COMMANDS)], list(COMMANDS))
        self.assertEqual(complete("fsdp2-ckpt", "reshard", "--mem"), ["--memory"])
        self.assertEqual(complete("fsdp2-ckpt", "verify", "--q"), ["--quick", "--quiet"])
        self.assertEqual(complete("fsdp2-ckpt", "verify", "st"), ["step-1"])


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

    def test_ranks(self):
        for name in ("dp3", "mixed"):
            sizes = {}
            for pieces in reader.Checkpoint(self.samples / name)._pieces_of.values():
                for piece in pieces:
                    sizes[piece.file] = sizes.get(piece.file, 0) + math.prod(piece.extent) * piece.tensor.itemsize
            document = self.document("inspect", self.samples / name, "--ranks")
            of_files = {f: sum(document["bytes_of_ranks"][rank] for rank in file["ranks"])
                        for f, file in enumerate(document["files"])}
            self.assertEqual(of_files, sizes)
        result = self.expect(0, "inspect", self.samples / "dp3", "--ranks", out=["balance"])
        bars = re.findall(r"^ +(\d) +(\d) +[\d.]+ \w+  (#+)$", result.stdout, re.MULTILINE)
        self.assertEqual([(rank, file) for rank, file, _ in bars], [("0", "0"), ("1", "1"), ("2", "2")])
        self.assertEqual(max(len(bar) for _, _, bar in bars), 40)

    def test_json(self):
        for name in ("dp3", "mixed", "empty"):
            checkpoint = reader.Checkpoint(self.samples / name)
            document = self.document("inspect", self.samples / name, "--tensors", "--ranks")
            self.assertEqual(document["save_id"], writer.SAVE_ID)
            self.assertEqual((document["step"], document["world_size"]), (checkpoint.step, checkpoint.world_size))
            self.assertEqual(json.loads(document["metadata"] or "null"), checkpoint.metadata)
            self.assertEqual(document["tensors"], len(checkpoint.tensors))
            self.assertEqual([(t["name"], t["dtype"], tuple(t["shape"]), int(t["digest"], 16)) for t in document["tensor_table"]],
                             [(t.name, t.dtype, tuple(t.shape), t.digest) for t in checkpoint.tensors.values()])
            self.assertEqual(sum(document["bytes_of_ranks"]), document["tensor_bytes"])
            for file in document["files"]:
                self.assertEqual((self.samples / name / file["name"]).stat().st_size, file["bytes"])
        mesh = self.document("inspect", self.samples / "mixed")["meshes"][1]
        self.assertEqual(mesh, {"name": "list", "axes": [{"name": "x", "size": 5, "role": "none"}], "ranks": [4, 0, 5, 2, 3]})

    def test_no_escape_reaches_the_terminal(self):
        evil = "\x1b]0;owned\x07\x9b2J\u202e\r\n\x7f"
        path = write_values(self.folder / "evil", {f"w{evil}": np.ones(3), "\u00e4\u2713": np.ones(3)}, mesh=f"m{evil}",
                            metadata=f"{evil}")
        index = path / "index.h5"
        for arguments in (["inspect", path, "--tensors", "--ranks"], ["verify", path], ["diff", path, self.samples / "dp3"]):
            result = self.tool(*arguments)
            self.assertTrue(result.stdout.replace("\n", "").isprintable(), result.stdout)
        result = self.expect(0, "inspect", path, "--tensors", out=["w\\x1b]0;owned\\x07\\xc2\\x9b2J\\xe2\\x80\\xae\\x0d\\x0a\\x7f", "\u00e4\u2713"])
        self.assertEqual(self.document("inspect", path, "--tensors")["tensor_table"][0]["name"], f"w{evil}")
        flip_tensor(path, f"w{evil}")
        shutil.copytree(path, self.folder / f"copy{evil}")
        for arguments in (["verify", path], ["verify", self.folder / f"copy{evil}"], ["reshard", self.folder / f"copy{evil}", self.folder / "out", "--world-size", 1]):
            result = self.tool(*arguments)
            self.assertTrue((result.stdout + result.stderr).replace("\n", "").isprintable(), result.stderr)
            self.assertIn("CRC", result.stderr)

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


class Pages(ToolTest):
    needs = ["dp3", "mixed", "grid", "empty"]

    def page(self, path, *arguments):
        file = self.folder / "page.html"
        self.expect(0, "inspect", path, "--html", file, *arguments, out=["step"])
        self.assertEqual(self.names(), ["page.html"])
        text = file.read_text()
        stack = []

        class Checker(html.parser.HTMLParser):
            def handle_starttag(self, tag, attributes):
                if tag not in ("meta", "br", "input", "rect"):
                    stack.append(tag)

            def handle_endtag(self, tag):
                if tag != "rect":
                    assert stack.pop() == tag, f"</{tag}>"

        Checker().feed(text)
        self.assertEqual(stack, [])
        self.assertNotRegex(text, r"(src|href)=|url\(|https?:")  # nothing from elsewhere
        return text

    def test_what_is_in_it(self):
        checkpoint = reader.Checkpoint(self.samples / "mixed")
        text = self.page(self.samples / "mixed")
        for tensor in checkpoint.tensors.values():
            self.assertIn(html.escape(tensor.name), text)
            self.assertIn(f"{tensor.digest:016x}", text)
        for part in ("<b>row</b>", "<b>list</b>", "dp = 3", checkpoint.save_id, "The largest rank has", "width=device-width"):
            self.assertIn(part, text)
        # One rectangle for each place of each mesh, and one for each box that differs.
        boxes = sum(len({str(t.box(rank)) for rank in t.mesh.ranks if math.prod(t.box(rank)[1])})
                    for t in checkpoint.tensors.values())
        self.assertEqual(text.count("<rect"), boxes + sum(math.prod(mesh.sizes) for mesh in checkpoint.meshes))

    def test_other_checkpoints(self):
        for name in ("dp3", "grid", "empty"):
            self.page(self.samples / name)
            (self.folder / "page.html").unlink()

    def test_names_are_text(self):
        evil = "<script>alert('1')</script>&\""
        path = write_values(self.samples / "evil", {evil: np.ones(3)}, metadata=json.dumps({evil: evil}), mesh=evil)
        text = self.page(path)
        self.assertEqual(text.count("<script"), 1)
        self.assertIn(html.escape(evil), text)

    def test_errors(self):
        self.expect(3, "inspect", self.samples / "dp3", "--html", self.folder / "no" / "page", err=["page"])
        self.expect(2, "inspect", self.folder, "--html", self.folder / "page", err=["not a checkpoint"])
        self.assertEqual(self.names(), [])


class Verify(ToolTest):
    needs = ["dp3", "grid", "mixed", "empty", "names"]

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

    def test_says_what_it_checked(self):
        tensors = len(reader.Checkpoint(self.samples / "dp3").tensors)
        self.expect(0, "verify", self.samples / "dp3", out=[f"3 of 3 files, {tensors} of {tensors} tensors"])
        self.expect(0, "verify", self.samples / "dp3", "--quick", out=["3 of 3 files", f"no bytes of {tensors} tensors"])
        document = self.document("verify", self.samples / "dp3")
        bytes_checked = sum(segment for shard in self.samples.glob("dp3/shard-*") for segment in self.arenas(shard))
        self.assertEqual(document, {"checkpoint": str(self.samples / "dp3"), "valid": True, "quick": False, "tensors": tensors,
                                    "tensors_checked": tensors, "files": 3, "files_checked": 3,
                                    "bytes_checked": bytes_checked, "problems": []})
        document = self.document("verify", self.samples / "dp3", "--quick")
        self.assertEqual((document["valid"], document["tensors_checked"], document["bytes_checked"]), (True, 0, 0))

    def arenas(self, shard):
        with h5py.File(shard, "r") as file:
            return [data.id.get_storage_size() for data in file["data"].values()]

    def test_says_what_it_could_not_check(self):
        path = self.copy("dp3")
        (path / "shard-00001-of-00003.h5").unlink()
        document = self.document("verify", path, status=1)
        lost = {piece.tensor.name for pieces in reader.Checkpoint(self.samples / "dp3")._pieces_of.values() for piece in pieces
                if piece.file == 1}
        self.assertEqual(document["files_checked"], 2)
        self.assertEqual(document["tensors"] - document["tensors_checked"], len(lost))
        self.assertEqual(len(document["problems"]), 1)
        self.assertIn("shard-00001-of-00003.h5", document["problems"][0])
        flip(path / "index.h5", dataset(path / "index.h5", "/check")[0])
        document = self.document("verify", path, status=1)
        self.assertFalse(document["valid"])
        self.assertIn("/check", document["problems"][0])

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


class Names(ToolTest):
    needs = ["names"]

    def test_there_and_back(self):
        """What Python writes, fsdp2 reads and writes, and Python reads again: names and metadata are the same bytes."""
        path = self.samples / "names"
        self.expect(0, "reshard", path, self.folder / "three", "--world-size=3", out=["equal"])
        self.expect(0, "diff", path, self.folder / "three", out=["are equal"])
        before, after = reader.Checkpoint(path), reader.Checkpoint(self.folder / "three")
        after.verify()
        self.assertEqual(after.metadata, {"text": 70000 * "m"})
        self.assertEqual({name: before.read(name).tobytes() for name in before.tensors},
                         {name: after.read(name).tobytes() for name in after.tensors})
        for arguments in (["--tensors"], ["--json", "--tensors"]):
            self.assertTrue(self.expect(0, "inspect", path, *arguments, out=["a/b"]).stdout.replace("\n", "").isprintable())


class Reshard(ToolTest):
    needs = ["dp3", "grid", "mixed"]

    def test_to_other_numbers_of_ranks(self):
        """Valid, and equal in all bits, by this tool and by another program."""
        source = reader.Checkpoint(self.samples / "dp3")
        for ranks in (1, 2, 5, 12):
            target = self.folder / f"to{ranks}"
            self.expect(0, "reshard", self.samples / "dp3", target, "--world-size", ranks, "--memory", "4KiB", "--rank-local=each",
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
        self.expect(0, "reshard", self.samples / "dp3", self.folder / "a", "--world-size", 7, "--rank-local=each", out=["7 ranks"])
        self.expect(0, "reshard", self.folder / "a", self.folder / "b", "--world-size", 3, "--rank-local=each", out=["3 ranks"])
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
        self.expect(0, "reshard", self.samples / "mixed", self.folder / "out", "--world-size", 4, "--memory", "4KiB", "--rank-local=first",
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
        self.expect(3, "reshard", self.samples / "dp3", self.folder / "file" / "out", "--world-size", 2, "--rank-local=each", err=["file"])
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
        self.expect(3, "reshard", path, self.folder / "out", "--world-size", 2, "--rank-local=each", err=[shard, "f32"])
        self.assertEqual(self.names(), ["damaged"])
        shutil.rmtree(path)
        path = self.copy("dp3")
        (path / "shard-00001-of-00003.h5").unlink()
        self.expect(3, "reshard", path, self.folder / "out", "--world-size", 2, err=["shard-00001-of-00003.h5"])
        self.assertEqual(self.names(), ["damaged"])

    def values(self, path):
        """Every tensor's bytes, by name, after the independent reader has checked all of it."""
        checkpoint = reader.Checkpoint(path)
        checkpoint.verify()
        return {name: checkpoint.read(name).tobytes() for name in checkpoint.tensors}

    def contents(self, name):
        return {tensor.name: writer.content(tensor).tobytes() for tensor in writer.SAMPLES[name]().tensors}

    def reshard(self, source, *arguments):
        """Reshards into a folder of a new name, and returns it."""
        target = self.folder / f"out{len(self.names())}"
        result = self.expect(0, "reshard", source, target, *arguments)
        self.assertIn("content digests equal", result.stdout)
        return target

    def test_chains(self):
        """Any way round, the bytes stay; ranks are ordered by number, not by text."""
        path = self.samples / "dp3"
        for arguments in (["--world-size", 12], ["--world-size", 1], ["--world-size", 101, "--ranks-per-file", 7],
                          ["--world-size", 3], ["--mesh", "dp=2,tp=2"], ["--mesh", "tp=3,dp=1"], ["--mesh", "dp=1"]):
            path = self.reshard(path, *arguments, "--rank-local=first", "--memory=16KiB")
            self.assertEqual(self.values(path), self.contents("dp3"))
            self.expect(0, "diff", self.samples / "dp3", path, out=["are equal"])

    def test_meshes(self):
        target = self.reshard(self.samples / "dp3", "--mesh", "tp=2,dp=3", "--rank-local=each")
        mesh = self.document("inspect", target)["meshes"][0]
        self.assertEqual(mesh["axes"], [{"name": "tp", "size": 2, "role": "none"}, {"name": "dp", "size": 3, "role": "shard"}])
        tensor = {t["name"]: t for t in self.document("inspect", target, "--tensors")["tensor_table"]}["f32.5x17.S1"]
        self.assertEqual((tensor["placements"], tensor["split_order"]), (["Replicate", "Shard(1)"], [1, 0]))
        target = self.reshard(self.samples / "grid", "--mesh", "tp=4,dp=3,pp=2")
        self.assertEqual(self.values(target), self.contents("grid"))
        self.assertEqual(reader.Checkpoint(target).world_size, 24)

    def test_named_meshes(self):
        target = self.reshard(self.samples / "mixed", "--mesh", "list:x=4", "--mesh", "row:dp=1,tp=4", "--rank-local=first")
        self.assertEqual(self.values(target), self.contents("mixed"))
        self.assertEqual([mesh["axes"][-1]["size"] for mesh in self.document("inspect", target)["meshes"]], [4, 4])
        target = self.reshard(self.samples / "mixed", "--mesh", "list:x=4", "--rank-local=first")  # the other is rescaled
        self.assertEqual(self.values(target), self.contents("mixed"))

    def test_meshes_that_do_not_fit(self):
        for sample, arguments, parts in (
                ("grid", ["--mesh", "dp=4"], ["dp=4", "cannot carry tensor", '"tp"']),
                ("dp3", ["--mesh", "tp=4"], ["tp=4", "cannot carry tensor", '"dp"', "Shard(0)"]),
                ("dp3", ["--mesh", "other:dp=4"], ['no mesh "other"', '"mesh"']),
                ("dp3", ["--mesh", "dp=4", "--world-size=3"], ["dp=4", "4 ranks", "3"]),
                ("mixed", ["--mesh", "list:x=4", "--mesh", "row:dp=3,tp=2"], ["6 ranks", "4"]),
                ("dp3", ["--mesh", "dp=2", "--mesh", "dp=3"], ["given before"]),
                *(("dp3", ["--mesh", text], ["--mesh"]) for text in (
                    "", "dp", "dp=", "dp=x", "dp=0", "dp=-1", "dp=2,", "dp=2,dp=2", "=2", "dp=2=3", "dp=99999999999999999999",
                    "dp=4294967296,tp=4294967296", "mesh:", "dp=2 "))):
            self.expect(2, "reshard", self.samples / sample, self.folder / "out", *arguments, "--rank-local=first", err=parts)
        self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", "--mesh=dp=3000000000", err=["2147483647"])
        self.assertEqual(self.names(), [])

    def test_ranks_per_file(self):
        for ranks, per_file, files in ((7, 3, [[0, 1, 2], [3, 4, 5], [6]]), (4, 9, [[0, 1, 2, 3]]), (2, 1, [[0], [1]])):
            target = self.reshard(self.samples / "dp3", "--world-size", ranks, "--ranks-per-file", per_file, "--rank-local=each")
            self.assertEqual(self.values(target), self.contents("dp3"))
            self.assertEqual([file["ranks"] for file in self.document("inspect", target)["files"]], files)
            self.expect(0, "verify", target, out=[": valid"])
        for value in ("0", "-1", "x"):
            self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", "--world-size=2", f"--ranks-per-file={value}",
                        err=["--ranks-per-file"])

    def test_rank_local(self):
        """dp3 has values of ranks 1 and 2."""
        one, two = b"state of rank 1", b"state of rank 2"
        for policy, ranks, expected in (
                ("each", 2, [{}, {"rng": one}]), ("each", 4, [{}, {"rng": one}, {"empty": b"", "rng": two}, {}]),
                ("first", 2, [{}, {}]), ("concatenate", 2, [{"rng": one}, {"empty": b"", "rng": two}]),
                ("concatenate", 1, [{"empty": b"", "rng": one + two}]), ("error", 3, [{}, {"rng": one}, {"empty": b"", "rng": two}])):
            for per_file in (1, 2):
                target = self.reshard(self.samples / "dp3", "--world-size", ranks, "--rank-local", policy, "--ranks-per-file", per_file)
                checkpoint = reader.Checkpoint(target)
                self.assertEqual([{key: bytes(value) for key, value in checkpoint.rank_local(rank).items()} for rank in range(ranks)],
                                 expected, policy)
        for arguments in ([], ["--rank-local=error"], ["--dry-run"]):
            self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", "--world-size=2", *arguments,
                        err=["rank-local values of 3 ranks", "--rank-local"])
        self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", "--world-size=2", "--rank-local=x", err=["--rank-local"])
        self.reshard(self.samples / "grid", "--world-size=2")  # has none
        self.assertNotIn("out", self.names())

    def test_include_and_exclude(self):
        target = self.reshard(self.samples / "dp3", "--world-size=2", "--include=f32.*", "--include", "nan.?16.*",
                              "--exclude=*.S1", "--rank-local=each")
        expected = {name: data for name, data in self.contents("dp3").items()
                    if (name.startswith("f32.") or name.startswith("nan.f16.")) and not name.endswith(".S1")}
        self.assertGreater(len(expected), 5)
        self.assertEqual(self.values(target), expected)
        for arguments, part in ((["--include=f31*"], "--include f31*"), (["--exclude=zz"], "--exclude zz"),
                                (["--exclude=*"], "no tensor is left")):
            self.expect(2, "reshard", self.samples / "dp3", self.folder / "out", "--world-size=2", *arguments, err=[part])

    def test_casts(self):
        numbers = np.array([0, -0.0, 1, 1 + 2**-9, 1 + 3 * 2**-9, 65504, 65520, 1e-7, -3.0e38, math.inf, math.nan, 5e-324])
        with np.errstate(over="ignore", under="ignore"):
            arrays = {"a": np.tile(numbers, 700), "b": np.tile(numbers.astype("f4"), 700), "i": np.arange(5)}
            halves = {name: arrays[name].astype("f2") for name in ("a", "b")}
        source = write_values(self.folder / "source", arrays)
        target = self.reshard(source, "--world-size=3", "--cast=[ab]=f16", "--memory=1")
        found = reader.Checkpoint(target)
        found.verify()
        for name in ("a", "b"):
            self.assertEqual(found.tensors[name].dtype, "f16")
            np.testing.assert_array_equal(np.frombuffer(found.read(name).tobytes(), "f2"), halves[name])
        self.assertEqual(found.tensors["i"].digest, reader.Checkpoint(source).tensors["i"].digest)
        back = reader.Checkpoint(self.reshard(target, "--world-size=2", "--cast=a=f64", "--cast=b=f64", "--cast=b=f32"))
        np.testing.assert_array_equal(np.frombuffer(back.read("a").tobytes(), "f8"), halves["a"].astype("f8"))
        np.testing.assert_array_equal(np.frombuffer(back.read("b").tobytes(), "f4"), halves["b"].astype("f4"))
        brief = reader.Checkpoint(self.reshard(source, "--world-size=2", "--cast=b=bf16"))
        wide = (np.frombuffer(brief.read("b").tobytes(), "u2").astype("u4") << 16).view("f4")
        bits = arrays["b"].view("u4").astype("u8")
        rounded = (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u4") << 16).view("f4")
        np.testing.assert_array_equal(wide, np.where(np.isnan(arrays["b"]), arrays["b"], rounded))
        for cast, part in (("i=f32", '"i" is i64'), ("a=i64", "cannot be cast to i64"), ("a=f8_e4m3", "f8_e4m3"), ("a", "--cast"),
                           ("a=f33", "f33"), ("z=f32", "--cast z")):
            self.expect(2, "reshard", source, self.folder / "out", "--world-size=2", f"--cast={cast}", err=[part])
        document = self.document("reshard", source, self.folder / "out", "--world-size=2", "--cast=a=bf16")
        self.assertEqual((document["casts"], document["digests_equal"]), (["a: f64 -> bf16"], 2))

    def test_cast_of_nothing(self):
        """A cast to the dtype that is there changes no bit, NaNs included, and the digest says so."""
        target = self.reshard(self.samples / "dp3", "--world-size=3", "--cast=nan.f32*=f32")
        self.assertEqual(self.values(target), self.contents("dp3"))

    def test_overwrite(self):
        target = self.reshard(self.samples / "grid", "--world-size=2")
        before = self.document("inspect", target)["save_id"]
        self.expect(2, "reshard", self.samples / "dp3", target, "--world-size=3", err=["--overwrite"])
        self.expect(0, "reshard", self.samples / "dp3", target, "--world-size=3", "--overwrite", out=["equal"])
        self.assertNotEqual(self.document("inspect", target)["save_id"], before)
        self.assertEqual(self.values(target), self.contents("dp3"))
        self.expect(0, "reshard", target, target, "--world-size=2", "--overwrite", "--rank-local=each", out=["equal"])  # itself
        self.assertEqual(self.values(target), self.contents("dp3"))
        self.assertEqual(self.names(), [target.name])

    def test_overwrite_replaces_checkpoints_only(self):
        (self.folder / "home").mkdir()
        (self.folder / "home" / "thesis").touch()
        self.expect(2, "reshard", self.samples / "grid", self.folder / "home", "--world-size=2", "--overwrite", err=["no checkpoint"])
        self.assertEqual(os.listdir(self.folder / "home"), ["thesis"])
        self.assertEqual(self.names(), ["home"])

    def test_overwrite_after_damage(self):
        """What could not be resharded leaves the old one."""
        target = self.reshard(self.samples / "grid", "--world-size=2")
        path = self.copy("dp3")
        shard = flip_tensor(path, "f32.5x17.S0")
        self.expect(3, "reshard", path, target, "--world-size=3", "--overwrite", err=[shard])
        self.assertEqual(self.values(target), self.contents("grid"))
        self.assertEqual(self.names(), ["damaged", target.name])

    def test_dry_run(self):
        """Says exactly what a run then does."""
        arguments = ["--world-size=5", "--ranks-per-file=2", "--memory=64KiB", "--rank-local=each", "--cast=f32.*=f64"]
        self.expect(0, "reshard", self.samples / "dp3", self.folder / "out", *arguments, "--dry-run", out=["would write", "3 shard files", "memory"])
        dry = self.document("reshard", self.samples / "dp3", self.folder / "out", *arguments, "--dry-run")
        self.assertEqual(self.names(), [])
        wet = self.document("reshard", self.samples / "dp3", self.folder / "out", *arguments)
        for file in wet["files"]:
            self.assertEqual((self.folder / "out" / file["name"]).stat().st_size, file["bytes"])
        self.assertEqual({**dry, "dry_run": False, "digests_equal": wet["digests_equal"]}, wet)
        self.assertEqual(wet["digests_equal"], wet["tensors"] - len(wet["casts"]))
        self.assertLessEqual(wet["memory_bytes"], 64 << 10)

    def test_quiet(self):
        result = self.expect(0, "reshard", self.samples / "dp3", self.folder / "out", "--world-size", 2, "--rank-local=each", "--quiet")
        self.assertEqual(result.stdout, "")
        self.assertEqual(self.names(), ["out"])


class Diff(ToolTest):
    needs = ["dp3"]

    def differences(self, a, b, *options, **changes):
        """Of a checkpoint of these arrays and one with some of them changed."""
        write_values(self.folder / "a", a)
        write_values(self.folder / "b", b, world_size=3)
        try:
            result = self.tool("diff", self.folder / "a", self.folder / "b", "--json", *options)
            document = json.loads(result.stdout)
            self.assertEqual(result.returncode, 0 if document["equal"] else 1)
            self.assertEqual(document["equal"], not document["differences"])
            return {entry.pop("name"): entry for entry in document["differences"]}
        finally:
            shutil.rmtree(self.folder / "a")
            shutil.rmtree(self.folder / "b")

    def test_equal(self):
        """NaNs of all kinds included; no byte is read, so damage and missing files do not matter."""
        path = self.copy("dp3")
        for shard in path.glob("shard-*"):
            shard.unlink()
        tensors = len(reader.Checkpoint(self.samples / "dp3").tensors)
        self.expect(0, "diff", self.samples / "dp3", path, out=["are equal", f"{tensors} tensors equal in all bits", "0 B read"])
        document = self.document("diff", self.samples / "dp3", path)
        self.assertEqual((document["equal"], document["tensors_equal"], document["bytes_read"]), (True, tensors, 0))

    def test_values(self):
        a = np.arange(35, dtype=np.float32).reshape(5, 7)
        b = a.copy()
        b[2, 3] += 0.5
        b[4, 6] -= 8
        found = self.differences({"w": a, "same": a}, {"w": b, "same": a})
        self.assertEqual(found, {"w": {"kind": "values", "elements": 2, "not_finite": 0, "max_absolute": 8.0,
                                       "max_relative": 8 / 26, "first": [2, 3]}})
        write_values(self.folder / "a", {"w": a})
        write_values(self.folder / "b", {"w": b})
        self.expect(1, "diff", self.folder / "a", self.folder / "b",
                    out=["w: 2 of 35 elements differ, the first at [2, 3]; max abs 8,", "DIFFER", "1 differences"])

    def test_many_windows(self):
        """More data than memory: the tensor is compared in windows of one block."""
        a = np.arange(12000, dtype=np.float64).reshape(3, 40, 100)
        b = a.copy()
        places = [(0, 0, 1), (0, 39, 99), (1, 3, 4), (2, 39, 99)]
        for n, place in enumerate(places):
            b[place] += n + 1
        found = self.differences({"w": a}, {"w": b}, "--memory", "1")["w"]
        self.assertEqual((found["elements"], found["first"], found["max_absolute"]), (4, [0, 0, 1], 4.0))
        b = a.copy()
        b[2, 39, 99] = -1
        found = self.differences({"w": a}, {"w": b}, "--memory", "1")["w"]
        self.assertEqual((found["elements"], found["first"], found["max_absolute"]), (1, [2, 39, 99], 12000.0))

    def test_not_finite(self):
        nan, inf = math.nan, math.inf
        a = np.array([nan, nan, inf, inf, 1, -0.0])
        b = np.array([nan, 1, inf, -inf, nan, 0.0])
        found = self.differences({"w": a}, {"w": b})["w"]
        self.assertEqual((found["elements"], found["not_finite"], found["first"]), (4, 3, [1]))
        self.assertEqual((found["max_absolute"], found["max_relative"]), (0, 0))
        found = self.differences({"w": a}, {"w": b}, "--atol", "1e300", "--rtol", "1")["w"]
        self.assertEqual((found["elements"], found["not_finite"], found["first"]), (3, 3, [1]))
        quiet, other = (np.array([bits], "<u8").view("<f8") for bits in (0x7FF8000000000000, 0x7FF8000000000001))
        self.assertEqual(self.differences({"w": quiet}, {"w": other})["w"]["not_finite"], 1)

    def test_tolerance(self):
        a, b = {"w": np.array([1.0, 100.0])}, {"w": np.array([1.5, 101.0])}
        self.assertEqual(self.differences(a, b, "--atol", "1"), {})
        self.assertEqual(self.differences(a, b, "--atol", "0.5", "--rtol", "0.005"), {})
        self.assertEqual(self.differences(a, b, "--atol", "0.9")["w"]["first"], [1])
        self.assertEqual(self.differences(a, b, "--rtol", "0.1")["w"]["elements"], 1)
        self.assertEqual(self.differences({"w": np.zeros(1)}, {"w": -np.zeros(1)})["w"]["elements"], 1)
        write_values(self.folder / "a", a)
        write_values(self.folder / "b", b)
        self.expect(0, "diff", self.folder / "a", self.folder / "b", "--atol", 1, out=["1 within the tolerance", "are equal"])

    def test_every_dtype(self):
        big = 2**63 - 1
        found = self.differences(
            {"i64": np.array([big, -big]), "u64": np.array([2**64 - 1], "u8"), "f16": np.array([1, 2], "f2"),
             "c": np.array([1 + 1j], "c8"), "scalar": np.float64(0) * np.ones(()), "b": ("bf16", np.array([0x3F80], "u2"))},
            {"i64": np.array([big - 1, big]), "u64": np.array([2**64 - 2], "u8"), "f16": np.array([1, 2.5], "f2"),
             "c": np.array([4 + 5j], "c8"), "scalar": np.ones(()), "b": ("bf16", np.array([0x4040], "u2"))})
        self.assertEqual({name: entry["max_absolute"] for name, entry in found.items()},
                         {"i64": float(2 * big), "u64": 1.0, "f16": 0.5, "c": 5.0, "scalar": 1.0, "b": 2.0})
        self.assertEqual(found["scalar"]["first"], [])
        back = self.differences({"w": np.ones(1)}, {"w": np.zeros(1)})["w"]
        self.assertIsNone(back["max_relative"])

    def test_other_tables(self):
        one = np.ones((2, 3))
        found = self.differences({"a": one, "s": one, "t": one, "z": one}, {"b": one, "s": one.T, "t": one.astype("f4"), "z": one})
        self.assertEqual(found, {"a": {"kind": "only_in_a"}, "b": {"kind": "only_in_b"},
                                 "s": {"kind": "shape", "a": [2, 3], "b": [3, 2]}, "t": {"kind": "dtype", "a": "f64", "b": "f32"}})
        write_values(self.folder / "a", {"a": one, "t": one})
        write_values(self.folder / "b", {"t": one.astype("f4").T})
        self.expect(1, "diff", self.folder / "a", self.folder / "b",
                    out=["a: only in " + str(self.folder / "a"), "t: dtype f64 and f32", "t: shape [2, 3] and [3, 2]"])

    def test_errors(self):
        sample = self.samples / "dp3"
        self.expect(2, "diff", sample, self.folder, err=["not a checkpoint"])
        self.expect(2, "diff", self.folder / "nowhere", sample, err=["not a directory"])
        for value, message in (("-1", "--rtol"), ("x", "--rtol"), ("nan", "tolerances nan")):
            self.expect(2, "diff", sample, sample, f"--rtol={value}", err=[message])
        write_values(self.folder / "a", {"w": np.ones(5)})
        write_values(self.folder / "b", {"w": np.zeros(5)})
        shard = flip_tensor(self.folder / "b", "w")
        self.expect(3, "diff", self.folder / "a", self.folder / "b", err=[shard, "CRC"])


class ListAndPrune(ToolTest):
    needs = []

    def run_of(self, *steps):
        root = self.folder / "run"
        for step in steps:
            write_values(root / f"step-{step:08}" if root.mkdir(exist_ok=True) is None else None, {"w": np.ones(4)}, step=step,
                         save_id=f"{step:032x}")
        return root

    def leftover(self, root, kind="partial", owner=None):
        path = root / f".step-00000099.{kind}-{'a' * 32}"
        path.mkdir()
        if owner:
            (path / "owner").write_text(owner)
        return path

    def test_list(self):
        root = self.run_of(300, 100, 2)
        (root / "notes").mkdir()
        os.truncate(root / "step-00000100" / "index.h5", 1000)
        result = self.expect(0, "list", root, out=["step-00000300", "UNREADABLE"])
        self.assertEqual([int(line.split()[0]) for line in result.stdout.splitlines()[1:]], [2, 100, 300])
        document = self.document("list", root)
        self.assertEqual([entry["step"] for entry in document], [2, 100, 300])
        self.assertEqual(["error" in entry for entry in document], [False, True, False])
        self.assertEqual((document[0]["world_size"], document[0]["tensors"], document[0]["path"]), (2, 1, str(root / "step-00000002")))
        self.assertEqual(self.document("list", self.folder / "run" / "notes"), [])

    def test_list_errors(self):
        self.expect(2, "list", self.folder / "nowhere", err=["nowhere", "not a directory"])

    def test_prune(self):
        root = self.run_of(100, 200, 250, 300, 400)
        before = sorted(os.listdir(root))
        arguments = ["prune", root, "--keep-last", 2, "--keep-every", 200]
        document = self.document(*arguments, "--dry-run")
        self.assertEqual(document, {"root": str(root), "dry_run": True, "leftovers": [],
                                    "checkpoints": [str(root / "step-00000100"), str(root / "step-00000250")]})
        self.expect(0, *arguments, "--dry-run", out=["would remove checkpoint " + str(root / "step-00000100")])
        self.assertEqual(sorted(os.listdir(root)), before)
        self.expect(0, *arguments, out=["removed checkpoint " + str(root / "step-00000250")])
        self.assertEqual(sorted(os.listdir(root)), ["step-00000200", "step-00000300", "step-00000400"])
        self.assertEqual(self.document(*arguments)["checkpoints"], [])

    def test_the_last_good_one_stays(self):
        root = self.run_of(1, 2, 3)
        for shard in (root / "step-00000003").glob("shard-*"):
            shard.unlink()
        self.expect(0, "prune", root, "--keep-last", 1, out=["step-00000001"])
        self.assertEqual(sorted(os.listdir(root)), ["step-00000002", "step-00000003"])

    def test_leftovers(self):
        root = self.run_of(1)
        partial = self.leftover(root, owner="host=elsewhere\nboot_id=1\npid=1\n")
        trash = self.leftover(root, "trash")
        self.assertEqual(self.document("prune", root, "--keep-last", 1)["leftovers"], [str(trash)])
        self.assertTrue(partial.exists())
        self.expect(0, "prune", root, "--keep-last", 1, "--partials", out=["removed leftover " + str(partial)])
        self.assertEqual(os.listdir(root), ["step-00000001"])

    def test_prune_errors(self):
        self.expect(2, "prune", self.folder / "nowhere", "--keep-last", 1, err=["nowhere", "not a directory"])
        for value in ("0", "-1", "x"):
            self.expect(2, "prune", self.folder, f"--keep-last={value}", err=["--keep-last"])
        self.expect(2, "prune", self.folder, "--keep-last=1", "--keep-every=0", err=["--keep-every"])


DTYPE_NAMES = {"f64": "F64", "f32": "F32", "f16": "F16", "bf16": "BF16", "f8_e4m3": "F8_E4M3", "f8_e5m2": "F8_E5M2",
               "i64": "I64", "i32": "I32", "i16": "I16", "i8": "I8", "u64": "U64", "u32": "U32", "u16": "U16", "u8": "U8",
               "bool": "BOOL", "complex64": "C64"}


def read_safetensors(path):
    """Header and bytes by name."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    return header, {name: data[8 + length:][slice(*entry["data_offsets"])] for name, entry in header.items()
                    if name != "__metadata__"}


def write_safetensors(path, header, data=b"", length=None):
    """header: an object, or text that need not be JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


class Progress(ToolTest):
    needs = ["dp3"]

    def test_lines_and_events(self):
        """At once, where a line is wanted every 0 seconds; by default not in so short a time."""
        some, file = self.folder / "some", self.folder / "f"
        for arguments in (["reshard", self.samples / "dp3", some, "--world-size=3", "--exclude=*complex128*", "--memory=1"],
                          ["verify", some], ["export", some, file, "--memory=1"], ["import", file, self.folder / "c", "--world-size=2"]):
            for flags in ([], ["--json"]):
                result = self.tool(*arguments, "--progress=0", *flags)
                self.assertEqual(result.returncode, 0, result.stderr)
                lines = result.stderr.splitlines()
                self.assertGreater(len(lines), 1)
                if flags:
                    events = [json.loads(line) for line in lines]
                    self.assertEqual({event["event"] for event in events}, {"progress"})
                    done = [event["done"] for event in events]
                    self.assertEqual(done, sorted(done))
                    self.assertEqual((done[-1], {event["total"] for event in events}), (events[-1]["total"], {done[-1]}))
                    json.loads(result.stdout)
                else:
                    for line in lines:
                        self.assertRegex(line, r"^[0-9.]+ \w+ of [0-9.]+ \w+, [0-9.]+ \w+/s, [0-9]+ s left$")
                if arguments[0] != "verify":
                    target = Path(arguments[2])
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
                self.assertEqual(self.tool(*arguments, *flags).stderr, "")
                if arguments[0] != "verify" and not flags:
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
        self.assertEqual(self.tool("verify", some, "--progress=0", "--quiet").stderr, "")
        self.expect(2, "verify", some, "--progress=-1", err=["--progress"])


class Safetensors(ToolTest):
    needs = ["dp3", "grid", "empty"]

    def test_there_and_back(self):
        """All dtypes of both formats, all shapes, metadata and step; then the same again from the copy."""
        some = self.folder / "some"
        self.expect(0, "reshard", self.samples / "dp3", some, "--world-size=3", "--exclude=*complex128*", out=["equal"])
        tensors = reader.Checkpoint(some).tensors
        self.assertEqual({tensor.dtype for tensor in tensors.values()}, set(DTYPE_NAMES))
        for memory in ("1", "1GiB"):
            file = self.folder / f"{memory}.safetensors"
            self.expect(0, "export", some, file, "--memory", memory, out=[f"{len(tensors)} tensors", "digests equal"])
            header, data = read_safetensors(file)
            self.assertEqual({name: data[name] for name in tensors},
                             {t.name: writer.content(t).tobytes() for t in writer.SAMPLES["dp3"]().tensors if t.name in tensors})
            self.assertEqual({n: (header[n]["dtype"], tuple(header[n]["shape"])) for n in tensors},
                             {t.name: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for t in tensors.values()})
            self.assertEqual((file.stat().st_size - sum(map(len, data.values()))) % 8, 0)
            for ranks, per_file in ((1, 1), (5, 2)):
                back = self.folder / f"back{memory}-{ranks}"
                self.expect(0, "import", file, back, "--world-size", ranks, "--ranks-per-file", per_file, "--memory", memory,
                            out=[f"{ranks} ranks", f"{len(tensors)} tensors"])
                self.expect(0, "diff", some, back, out=["are equal"])
                checkpoint = reader.Checkpoint(back)
                checkpoint.verify()
                self.assertEqual((checkpoint.step, checkpoint.metadata), (100, {"lr": 0.5, "text": "\u00e4"}))
                self.expect(0, "export", back, self.folder / "again", out=["equal"])
                self.assertEqual((self.folder / "again").read_bytes(), file.read_bytes())
                (self.folder / "again").unlink()

    def test_large_tensors(self):
        source = write_values(self.folder / "a", {"w": np.random.default_rng(1).standard_normal((700, 9))}, world_size=3)
        self.assertEqual(self.document("export", source, self.folder / "f", "--memory=1")["tensors"], 1)
        document = self.document("import", self.folder / "f", self.folder / "b", "--world-size=4", "--memory=1")
        self.assertEqual((document["world_size"], document["tensor_bytes"]), (4, 700 * 9 * 8))
        self.expect(0, "diff", source, self.folder / "b", out=["are equal"])

    def test_metadata(self):
        """That of the file is kept, whoever wrote it."""
        entry = {"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
        for metadata, expected in (({"format": "pt"}, {"format": "pt"}), ({}, None), (None, None),
                                   ({"fsdp2.step": "x"}, {"fsdp2.step": "x"}), ({"fsdp2.metadata": "{"}, {"fsdp2.metadata": "{"})):
            file = write_safetensors(self.folder / "f", {**entry, **({} if metadata is None else {"__metadata__": metadata})}, b"ab")
            self.expect(0, "import", file, self.folder / "c", "--world-size=1", out=["1 tensors"])
            self.assertEqual(reader.Checkpoint(self.folder / "c").metadata, expected)
            self.expect(0, "export", self.folder / "c", self.folder / "g", out=["equal"])
            found = read_safetensors(self.folder / "g")[0]["__metadata__"]
            if metadata == {"format": "pt"}:
                self.assertEqual(found, {"format": "pt", "fsdp2.step": "0"})
            (self.folder / "g").unlink()
            shutil.rmtree(self.folder / "c")

    def test_what_the_format_forbids(self):
        def one(dtype="U8", shape=(2,), offsets=(0, 2), **more):
            return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}

        text = json.dumps({"w": one()}).encode()
        for header, data, part in (
                ({"a": one(), "b": one(offsets=(1, 3))}, b"abc", 'tensor "b": begins at byte 1'),
                ({"a": one(), "b": one(offsets=(1, 3))}, b"abc", "overlap"),
                ({"a": one(), "b": one()}, b"ab", "overlap"),
                ({"a": one(), "b": one(offsets=(3, 5))}, b"abcde", "hole"),
                ({"a": one(offsets=(1, 3))}, b"abc", "hole"),
                ({"a": one()}, b"abc", "something follows"), ({"a": one()}, b"a", "truncated"), ({}, b"a", "something follows"),
                (b'{"w": %s, "w": %s}' % (2 * (json.dumps(one()).encode(),)), b"ab", '"w" twice'),
                (b'{"w": {"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab", '"dtype" twice'),
                (b'{"__metadata__": {"a":"1","a":"2"}}', b"", '"a" twice'),
                ({"w": one(shape=(2**62, 8), offsets=(0, 0))}, b"", 'tensor "w"'),
                ({"w": one(shape=(2**63,))}, b"ab", 'tensor "w"'), ({"w": one(shape=(2**65,))}, b"ab", 'tensor "w"'),
                ({"w": one("F64", (2**61,), (0, 0))}, b"", 'tensor "w"'), ({"w": one(shape=(0, 2**62, 8), offsets=(0, 0))}, b"", "w"),
                ({"w": one(shape=(-2,))}, b"ab", "shape has -2"), ({"w": one(shape=(2.0,))}, b"ab", "shape has 2.0"),
                ({"w": one(shape=(3,))}, b"ab", "has 3 bytes, but"), ({"w": one(offsets=(2, 0))}, b"ab", "data_offsets"),
                ({"w": one(offsets=(0, 1, 2))}, b"ab", "data_offsets"), ({"w": one(offsets=(0, "2"))}, b"ab", "data_offsets"),
                ({"w": one("F4")}, b"ab", "no dtype F4"), ({"w": one(7)}, b"ab", "dtype"), ({"w": one(more=1)}, b"ab", "expected"),
                ({"w": {"dtype": "U8", "shape": [2]}}, b"ab", "expected"), ({"w": 3}, b"ab", "expected"),
                ({"": one()}, b"ab", "no name"), ({"__metadata__": {"a": 1}}, b"", "no string"), ({"__metadata__": []}, b"", "metadata"),
                (b'{"\xff": 1}', b"", "JSON"), (b'{"\xc0\xaf": 1}', b"", "JSON"), (b'{"w"', b"", "JSON"), (b"{} {}", b"", "JSON"),
                (b"[]", b"", "'{'"), (b" {}", b"", "'{'"), (b"", b"", "'{'"),
                (b'{"a":' * 100000, b"", "nested"), (b'{"a":{"shape":' + b"[" * 100000, b"", "nested")):
            file = write_safetensors(self.folder / "in", header, data)
            self.expect(2, "import", file, self.folder / "out", "--world-size=2", err=["safetensors", part])
        for length, part in ((100_000_001, "longer than 100000000"), (2**64 - 1, "longer"), (len(text) + 3, "truncated"), (2, "JSON")):
            self.expect(2, "import", write_safetensors(self.folder / "in", text, b"ab", length), self.folder / "out",
                        "--world-size=2", err=[part])
        (self.folder / "in").write_bytes(b"1234567")
        self.expect(2, "import", self.folder / "in", self.folder / "out", "--world-size=2", err=["too few"])
        self.assertEqual(self.names(), ["in"])

    def test_shards(self):
        """Names and index as Hugging Face's: tensors of wide elements first, none of them cut."""
        some = self.folder / "some"
        self.expect(0, "reshard", self.samples / "dp3", some, "--world-size=3", "--exclude=*complex128*", out=["equal"])
        tensors = reader.Checkpoint(some).tensors
        out = self.folder / "out"
        document = self.document("export", some, out, "--max-shard-size=1KiB")
        names = sorted(path.name for path in out.iterdir())
        count = len(names) - 1
        self.assertGreater(count, 3)
        self.assertEqual(names, [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] +
                         ["model.safetensors.index.json"])
        self.assertEqual((document["files"], document["tensors"]), (count, len(tensors)))
        self.assertEqual(document["file_bytes"], sum((out / name).stat().st_size for name in names[:-1]))
        index = json.loads((out / names[-1]).read_text())
        sizes = {t.name: t.itemsize * math.prod(t.shape) for t in tensors.values()}
        self.assertEqual(index["metadata"], {"total_size": sum(sizes.values())})
        self.assertEqual(sorted(index["weight_map"]), sorted(tensors))
        for name in names[:-1]:
            header, data = read_safetensors(out / name)
            self.assertEqual(sorted(data), sorted(t for t, file in index["weight_map"].items() if file == name))
            self.assertEqual(header["__metadata__"]["fsdp2.step"], "100")
            self.assertTrue(len(data) == 1 or sum(map(len, data.values())) <= 1024)
            for tensor, found in data.items():
                self.assertEqual(found, reader.Checkpoint(some).read(tensor).tobytes(), tensor)
        for source in (out, out / names[-1]):
            self.expect(0, "import", source, self.folder / "back", "--world-size=2", out=[f"{len(tensors)} tensors"])
            self.expect(0, "diff", some, self.folder / "back", out=["are equal"])
            self.assertEqual(reader.Checkpoint(self.folder / "back").metadata, {"lr": 0.5, "text": "\u00e4"})
            shutil.rmtree(self.folder / "back")
        self.expect(0, "export", some, self.folder / "whole", "--max-shard-size=1GiB", out=["equal"])
        self.assertEqual([path.name for path in (self.folder / "whole").iterdir()], ["model.safetensors"])
        self.expect(2, "export", some, self.folder / "x", "--max-shard-size=0", err=["--max-shard-size"])
        self.assertEqual(self.names(), ["out", "some", "whole"])

    def test_shards_that_do_not_fit_together(self):
        entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
        files = self.folder / "in"
        files.mkdir()
        (self.folder / "outside").mkdir()
        for path, name in ((files / "a", "wa"), (files / "b", "wb"), (self.folder / "outside" / "c", "wc")):
            write_safetensors(path, {name: entry}, b"xy")
        index = files / "model.safetensors.index.json"
        good = {"wa": "a", "wb": "b"}
        for weight_map, part in (
                ({**good, "wc": "../outside/c"}, 'tensor "wc"'), ({**good, "wc": str(self.folder / "outside" / "c")}, 'tensor "wc"'),
                ({**good, "wc": ".."}, 'tensor "wc"'), ({**good, "wc": ""}, 'tensor "wc"'), ({**good, "wc": 1}, 'tensor "wc"'),
                ({**good, "wc": "b\0"}, 'tensor "wc"'), ({**good, "wc": "b"}, 'tensor "wc" is not in b'),
                ({"wa": "b", "wb": "a"}, 'tensor "wa" is not in b'), ({**good, "wc": "c"}, 'tensor "wc" is in c, which is not there'),
                ({"wa": "a", "x": "b"}, 'tensor "x" is not in b'), (["wa"], "no object weight_map")):
            index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            self.expect(2, "import", files, self.folder / "out", "--world-size=1", err=[part])
        for text, part in (("{", "is no JSON"), ("{}", "weight_map"), ("[]", "weight_map"), ("", "is no JSON"),
                           ('{"weight_map": {"wa": "a", "wa": "a"}}', '"wa" twice'), ("[" * 100000, "nested")):
            index.write_text(text)
            self.expect(2, "import", index, self.folder / "out", "--world-size=1", err=["index.json", part])
        index.write_text(json.dumps({"weight_map": {"wa": "a"}}))
        write_safetensors(files / "a", {"wa": entry, "more": {**entry, "data_offsets": [2, 4]}}, b"xyzw")
        self.expect(2, "import", files, self.folder / "out", "--world-size=1", err=['tensor "more"', "is missing"])
        write_safetensors(files / "b", {"wa": entry}, b"xy")
        index.write_text(json.dumps({"weight_map": {"wa": "a", "more": "b"}}))
        self.expect(2, "import", files, self.folder / "out", "--world-size=1", err=['tensor "wa"', "too"])
        shutil.copy(index, files / "other.safetensors.index.json")
        self.expect(2, "import", files, self.folder / "out", "--world-size=1", err=["has 2 files"])
        self.assertEqual(self.names(), ["in", "outside"])

    def test_import_to_meshes(self):
        rows, columns = np.arange(42, dtype=np.float32).reshape(6, 7), np.arange(40, dtype=np.float64).reshape(5, 8)
        source = write_values(self.folder / "a", {"columns": columns, "rows": rows, "scalar": np.array(3.0)}, world_size=1)
        self.expect(0, "export", source, self.folder / "f", out=["equal"])
        self.expect(0, "import", self.folder / "f", self.folder / "c", "--mesh=net:replicate=2,dp=3,tp=2", "--shard-dim=c*=1",
                    "--ranks-per-file=4", out=["12 ranks"])
        self.expect(0, "diff", source, self.folder / "c", out=["are equal"])
        checkpoint = reader.Checkpoint(self.folder / "c")
        checkpoint.verify()
        [mesh] = checkpoint.meshes
        self.assertEqual((mesh.name, mesh.axes, mesh.sizes, mesh.roles), ("net", ["replicate", "dp", "tp"], [2, 3, 2], [2, 1, 0]))
        self.assertEqual({t.name: t.placements for t in checkpoint.tensors.values()},
                         {name: f"net(replicate=2: Replicate, dp=3: {placement}, tp=2: Replicate)" for name, placement in
                          (("columns", "Shard(1)"), ("rows", "Shard(0)"), ("scalar", "Replicate"))})
        self.expect(0, "import", self.folder / "f", self.folder / "d", "--mesh=x=3", "--world-size=3", out=["3 ranks"])
        self.assertEqual(reader.Checkpoint(self.folder / "d").tensors["rows"].placements, "mesh(x=3: Shard(0))")
        for arguments, part in ((["--mesh=x=3", "--world-size=2"], "world size is 2"), (["--mesh=x=0"], "x"), (["--mesh=x"], "--mesh"),
                                (["--world-size=2", "--shard-dim=rows=2"], "rows"), (["--world-size=2", "--shard-dim=1"], "GLOB=value"),
                                (["--world-size=2", "--shard-dim=a=b"], "no number"), ([], "--world-size or --mesh")):
            self.expect(2, "import", self.folder / "f", self.folder / "e", *arguments, err=[part])
        self.assertEqual(self.names(), ["a", "c", "d", "f"])

    def test_export_of_some_and_as_other_dtypes(self):
        values = {"a.w": np.array([[1.5, -2.25], [3e38, 0]], np.float32), "b.w": np.array([1.0, 2.0]), "c": np.arange(3)}
        source = write_values(self.folder / "a", values)
        self.expect(0, "export", source, self.folder / "f", "--include=*.w", "--cast=a.*=bf16", "--cast=b.*=f32", "--memory=1",
                    out=["2 tensors", "2 cast, all other content digests equal"])
        header, data = read_safetensors(self.folder / "f")
        self.assertEqual({name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"},
                         {"a.w": "BF16", "b.w": "F32"})
        self.assertEqual(reader.to_float32(np.frombuffer(data["a.w"], np.uint16), "bf16").tolist(),
                         [1.5, -2.25, float.fromhex("0x1.c4p127"), 0])
        self.assertEqual(np.frombuffer(data["b.w"], np.float32).tolist(), [1, 2])
        self.expect(0, "export", source, self.folder / "g", "--exclude=*.w", out=["1 tensors"])
        self.assertEqual(read_safetensors(self.folder / "g")[1], {"c": np.arange(3).tobytes()})
        self.expect(2, "export", source, self.folder / "h", "--include=x*", err=["x*"])
        self.expect(2, "export", source, self.folder / "h", "--exclude=*", err=["no tensor is left"])
        self.expect(2, "export", source, self.folder / "h", "--cast=c=f32", err=['"c"', "cannot be cast"])
        self.assertEqual(self.names(), ["a", "f", "g"])

    def test_errors(self):
        out = self.folder / "out"
        self.expect(2, "export", self.samples / "dp3", out, err=["complex128"])
        self.expect(2, "export", self.folder, out, err=["not a checkpoint"])
        self.expect(3, "export", self.samples / "empty", self.folder / "no" / "out", err=["no"])
        self.expect(2, "import", self.folder / "nowhere", out, "--world-size=1", err=["nowhere"])
        self.expect(2, "import", self.folder, out, "--world-size=1", err=["has 0 files"])
        self.expect(2, "import", __file__, out, err=["--world-size"])
        self.expect(2, "import", __file__, out, "--world-size=0", err=["--world-size"])
        self.assertEqual(self.names(), [])
        self.expect(0, "export", self.samples / "empty", out, out=["0 tensors"])
        self.expect(2, "export", self.samples / "empty", out, err=["already exists"])
        self.expect(2, "import", out, self.folder, "--world-size=1", err=["already exists"])
        self.expect(3, "import", out, out / "x", "--world-size=1", err=["out"])
        self.expect(0, "import", out, self.folder / "c", "--world-size=3", out=["3 ranks"])
        path = write_values(self.folder / "d", {"w": np.ones(5)})
        shard = flip_tensor(path, "w")
        self.expect(3, "export", path, self.folder / "e", err=[shard, "CRC"])
        self.assertEqual(self.names(), ["c", "d", "out"])


del ToolTest


if __name__ == "__main__":
    unittest.main()
