# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""fsdp2-ckpt with more data than memory, many tensors, many files. Usage: limits_test.py <fsdp2-ckpt>"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np

TOOL = sys.argv.pop(1)
MIB = 1 << 20


def write_safetensors(path, shapes, dtype):
    """Random tensors of these shapes, by name, one after another. In parts: what this process had in memory would count
    as memory of the programs that it starts."""
    header, begin = {}, 0
    itemsize = {"F32": 4, "U8": 1}[dtype]
    for name, shape in shapes.items():
        end = begin + itemsize * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    random = np.random.default_rng(begin)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, begin, MIB):
            file.write(random.bytes(min(MIB, begin - at)))
    return begin


def digest_of_end(path, size):
    """Of the last bytes of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(-size, os.SEEK_END)
        while part := file.read(MIB):
            digest.update(part)
    return digest.hexdigest()


class Limits(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def tool(self, *arguments, status=0, rss=None, files=None):
        """Runs the tool, with at most `files` open; it may have `rss` bytes in memory. Returns what it printed."""
        def limit():
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen([TOOL, *map(str, arguments)], stdout=output, stderr=subprocess.STDOUT, preexec_fn=limit)
            _, code, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(code)
            output.seek(0)
            text = output.read()
        self.assertEqual(process.returncode, status, text[:1000])
        if rss is not None:
            self.assertLess(usage.ru_maxrss * 1024, rss, f"bytes in memory of {arguments}")
        return text

    def digests(self, checkpoint):
        document = json.loads(self.tool("inspect", checkpoint, "--tensors", "--json"))
        return {tensor["name"]: tensor["digest"] for tensor in document["tensor_table"]}

    def assert_same_data(self, a, b, size):
        self.assertEqual(digest_of_end(self.folder / a, size), digest_of_end(self.folder / b, size))

    def test_more_data_than_memory(self):
        """512 MiB through 16 MiB."""
        shapes = {"a.large": [6 * MIB, 16], "b.small": [1000, 1024], "c.rest": [32 * MIB - 1024000]}
        size = write_safetensors(self.folder / "in", shapes, "F32")
        self.assertEqual(size, 512 * MIB)
        budget = ("--memory", "16MiB")
        limit = 64 * MIB
        self.tool("import", self.folder / "in", self.folder / "one", "--world-size=1", *budget, rss=limit)
        self.tool("reshard", self.folder / "one", self.folder / "three", "--world-size=3", "--ranks-per-file=2", *budget, rss=limit)
        self.tool("reshard", self.folder / "three", self.folder / "grid", "--mesh=dp=2,tp=2", *budget, rss=limit)
        self.tool("verify", self.folder / "grid", rss=limit)
        self.tool("diff", self.folder / "one", self.folder / "grid", *budget, rss=limit)
        self.tool("export", self.folder / "grid", self.folder / "out", *budget, rss=limit)
        self.assert_same_data("in", "out", size)

    def test_many_tensors(self):
        count, limit = 100000, 400 * MIB
        shapes = {f"model.layers.{i:05}.self_attn.weight": [3, 2] for i in range(count)}
        size = write_safetensors(self.folder / "in", shapes, "U8")
        self.tool("import", self.folder / "in", self.folder / "a", "--world-size=2", rss=limit)
        self.tool("reshard", self.folder / "a", self.folder / "b", "--world-size=3", rss=limit)
        self.assertIn("100000 of 100000 tensors", self.tool("verify", self.folder / "b", rss=limit))
        self.tool("diff", self.folder / "a", self.folder / "b", rss=limit)
        self.tool("inspect", self.folder / "b", "--ranks", rss=limit)
        # Others of the same names, in the same blocks: each is read once, or a few times, not for every tensor.
        write_safetensors(self.folder / "other", {**shapes, "z": [1]}, "U8")
        self.tool("import", self.folder / "other", self.folder / "c", "--world-size=2")
        found = json.loads(self.tool("diff", self.folder / "a", self.folder / "c", "--json", status=1, rss=limit))
        self.assertGreater(len(found["differences"]), count // 2)
        self.assertLess(found["bytes_read"], 100 * MIB)
        self.tool("export", self.folder / "b", self.folder / "out", rss=limit)
        self.assert_same_data("in", "out", size)

    def test_more_pieces_than_a_view_has(self):
        count = 1000001
        write_safetensors(self.folder / "in", {f"{i:07}": [1] for i in range(count)}, "U8")
        self.tool("import", self.folder / "in", self.folder / "a", "--world-size=1")
        self.assertIn(f"has {count} pieces, and a view maps at most 1000000", self.tool("view", self.folder / "a", status=2))
        self.assertEqual(sorted(os.listdir(self.folder / "a")), ["index.h5", "shard-00000-of-00001.h5"])

    def test_many_files(self):
        """More than can be open at a time; their order is that of numbers, not of text."""
        size = write_safetensors(self.folder / "in", {"columns": [7, 650], "rows": [1200, 2], "scalar": []}, "F32")
        few = {"files": 64}
        self.tool("import", self.folder / "in", self.folder / "many", "--world-size=300", **few)
        self.assertEqual(len(list((self.folder / "many").glob("shard-*"))), 300)
        self.tool("verify", self.folder / "many", **few)
        self.tool("verify", self.folder / "many", "--quick", **few)
        for ranks in (101, 12):
            self.tool("reshard", self.folder / "many", self.folder / f"{ranks}", f"--world-size={ranks}", **few)
        self.tool("reshard", self.folder / "101", self.folder / "3", "--world-size=3", **few)
        self.tool("reshard", self.folder / "12", self.folder / "1", "--world-size=1", **few)
        for name in ("101", "12", "3", "1"):
            self.assertEqual(self.digests(self.folder / name), self.digests(self.folder / "many"))
            self.tool("diff", self.folder / "many", self.folder / name, **few)
        self.tool("view", self.folder / "many", **few)
        self.tool("inspect", self.folder / "many", "--ranks", **few)
        self.tool("export", self.folder / "many", self.folder / "out", **few)
        self.tool("export", self.folder / "1", self.folder / "out-1", **few)
        self.assertEqual((self.folder / "out").read_bytes(), (self.folder / "out-1").read_bytes())
        self.assert_same_data("in", "out", size)


if __name__ == "__main__":
    unittest.main()
