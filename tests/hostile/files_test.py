# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Loads checkpoints in which HDF5 is used as fsdp2 does not use it, with every checksum and digest right: they must be
refused by a CheckpointError that names the file, in a second and without much memory. What is not refused gives its
content. Usage: files_test.py <hostile_reader>

What false numbers under true digests do is in tests/unit: index_file_test.cpp and shard_file_test.cpp.
"""

import os
import struct
import sys
import tempfile
import unittest
from pathlib import Path

import h5py
import numpy as np

import hostile

PROGRAM = sys.argv.pop(1)
IS_SANITIZED = b"__asan_init" in Path(PROGRAM).read_bytes()
INDEX, SHARD = "index.h5", "shard-00001-of-00003.h5"
INDEX_PATHS = """/files/rank_ptr /files/ranks /files/size /header /library /mesh/axis_name_bytes /mesh/axis_name_ptr
    /mesh/axis_ptr /mesh/axis_role /mesh/axis_size /mesh/name_bytes /mesh/name_ptr /mesh/rank_ptr /mesh/ranks /metadata
    /ragged/bounds /ragged/bounds_ptr /segments /table/digest /table/dtype /table/mesh /table/name_bytes /table/name_ptr
    /table/placement_bounds /table/placement_dim /table/placement_kind /table/placement_ptr /table/shape /table/shape_ptr
    /table/split_order""".split()  # FORMAT.md §8


# ---- Digests and checksums ----

CRC_TABLE = []
for value in range(256):
    for _ in range(8):
        value = value >> 1 ^ (0xC96C5795D7870F42 if value & 1 else 0)
    CRC_TABLE.append(value)


def crc(data):
    register = 2**64 - 1
    for octet in data:
        register = CRC_TABLE[(register ^ octet) & 255] ^ register >> 8
    return register ^ 2**64 - 1


def lookup3(data):
    """The checksum of HDF5's metadata."""
    mask = 2**32 - 1

    def rotate(x, k):
        return (x << k | x >> 32 - k) & mask

    a = b = c = 0xDEADBEEF + len(data) & mask
    data += bytes(-len(data) % 12)
    words = struct.unpack(f"<{len(data) // 4}I", data)
    for i in range(0, len(words), 3):
        a, b, c = a + words[i] & mask, b + words[i + 1] & mask, c + words[i + 2] & mask
        if i + 3 < len(words):
            a = (a - c & mask) ^ rotate(c, 4); c = c + b & mask
            b = (b - a & mask) ^ rotate(a, 6); a = a + c & mask
            c = (c - b & mask) ^ rotate(b, 8); b = b + a & mask
            a = (a - c & mask) ^ rotate(c, 16); c = c + b & mask
            b = (b - a & mask) ^ rotate(a, 19); a = a + c & mask
            c = (c - b & mask) ^ rotate(b, 4); b = b + a & mask
    c = (c ^ b) - rotate(b, 14) & mask
    a = (a ^ c) - rotate(c, 11) & mask
    b = (b ^ a) - rotate(a, 25) & mask
    c = (c ^ b) - rotate(b, 16) & mask
    a = (a ^ c) - rotate(c, 4) & mask
    b = (b ^ a) - rotate(a, 14) & mask
    return (c ^ b) - rotate(b, 24) & mask


def index_columns(path):
    """The datasets of an index, by their paths: not by walking through the file, which may have no end."""
    with h5py.File(path, "r") as file:
        return {name: file[name][...] for name in INDEX_PATHS}


def index_check(columns):
    return crc(b"".join(struct.pack("<Q", columns[name].nbytes) + columns[name].tobytes()
                        for name in sorted(columns)))


# ---- Files ----


def put(file, name, data, **how):
    """A contiguous dataset, or as `how` says."""
    return file.create_dataset(name, data=data, track_times=False, **how)


def raw(file, name, kind, space, **how):
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    for key, arguments in how.items():
        getattr(create, key)(*arguments)
    return h5py.h5d.create(file.id, name.encode(), kind, space, dcpl=create, lcpl=None)


def simple(*dims):
    return h5py.h5s.create_simple(dims)


def committed(file, name, data, kind):
    h5py.h5t.py_create(np.dtype(kind)).commit(file.id, b"/kind")
    dataset = raw(file, name, h5py.h5t.open(file.id, b"/kind"), simple(*data.shape))
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(data), mtype=h5py.h5t.py_create(data.dtype))


def virtual(file, name, data):
    put(file, "/elsewhere", data)
    layout = h5py.VirtualLayout(data.shape, data.dtype)
    layout[...] = h5py.VirtualSource(".", "/elsewhere", data.shape)
    file.create_virtual_dataset(name, layout)


def soft(file, name, data):
    put(file, "/elsewhere", data)
    file[name] = h5py.SoftLink("/elsewhere")


def soft_cycle(file, name, data):
    file[name] = h5py.SoftLink(name)


def external_link(file, name, data):
    other = Path(file.filename).parent / "other.h5"
    with h5py.File(other, "w") as target:
        put(target, "/d", data)
    file[name] = h5py.ExternalLink("other.h5", "/d")


def external_storage(file, name, data):
    other = Path(file.filename).parent / "other.raw"
    other.write_bytes(data.tobytes())
    file.create_dataset(name, shape=data.shape, dtype=data.dtype, external=[(str(other), 0, data.nbytes)])


def group(file, name, data):
    file.create_group(name)


def hard_link_to_the_root(file, name, data):
    """A cycle of groups."""
    file[name] = file["/"]


def huge(file, name, data):
    """Late allocation: the extent costs nothing."""
    dims = (2**50, *data.shape[1:])
    raw(file, name, h5py.h5t.py_create(data.dtype), simple(*dims), set_alloc_time=(h5py.h5d.ALLOC_TIME_LATE,),
        set_fill_time=(h5py.h5d.FILL_TIME_NEVER,))


def variable_length(file, name, data):
    dataset = file.create_dataset(name, (data.shape[0],), dtype=h5py.vlen_dtype(data.dtype))
    dataset[0] = data.reshape(-1)


# What to make of a dataset; None in place of a message: its content is as it was.
TRICKS = {
    "soft link": (soft, "soft or external link"),
    "soft link to itself": (soft_cycle, "soft or external link"),
    "external link": (external_link, "soft or external link"),
    "external storage": (external_storage, "external storage"),
    "chunks": (lambda f, n, d: put(f, n, d, chunks=d.shape), "not contiguous"),
    "gzip": (lambda f, n, d: put(f, n, d, compression="gzip"), "not contiguous"),
    "shuffle and checksums": (lambda f, n, d: put(f, n, d, shuffle=True, fletcher32=True), "not contiguous"),
    "resizable": (lambda f, n, d: put(f, n, d, maxshape=(None,) * d.ndim), "not contiguous"),
    "virtual": (virtual, "not contiguous"),
    "group": (group, "H5Dopen2"),
    "cycle of groups": (hard_link_to_the_root, "H5Dopen2"),
    "huge extent": (huge, "elements, more than the file has bytes"),
    "variable length": (variable_length, "another type"),
    "strings": (lambda f, n, d: put(f, n, d.astype("S8")), "another type"),
    "floats": (lambda f, n, d: put(f, n, d.astype("<f8")), "another type"),
    "arrays": (lambda f, n, d: raw(f, n, h5py.h5t.array_create(h5py.h5t.py_create(d.dtype), (3,)), simple(*d.shape),
                                   set_alloc_time=(h5py.h5d.ALLOC_TIME_EARLY,)), "another type"),
    "compounds": (lambda f, n, d: put(f, n, np.zeros(d.shape, [("a", d.dtype)])), "another type"),
    "references": (lambda f, n, d: f.create_dataset(n, d.shape, dtype=h5py.ref_dtype), "another type"),
    "committed type": (lambda f, n, d: committed(f, n, d, d.dtype), None),
    "committed type of another size": (lambda f, n, d: committed(f, n, d, "<u4"), "another type"),
    "committed type of another order": (lambda f, n, d: committed(f, n, d, ">u8"), "another type"),
    "another size": (lambda f, n, d: put(f, n, d.astype("<u2")), "another type"),
    "no dimension": (lambda f, n, d: put(f, n, d.flat[0]), "has 0 dimensions"),
    "a dimension more": (lambda f, n, d: put(f, n, d[..., np.newaxis]), "dimensions: expected"),
    "thirty-two dimensions": (lambda f, n, d: put(f, n, d.reshape(d.shape + (1,) * (32 - d.ndim))), "has 32 dimensions"),
    "null": (lambda f, n, d: f.create_dataset(n, dtype=d.dtype, data=h5py.Empty(d.dtype)), "dimensions"),
    "not allocated": (lambda f, n, d: raw(f, n, h5py.h5t.py_create(d.dtype), simple(*d.shape),
                                          set_alloc_time=(h5py.h5d.ALLOC_TIME_LATE,)), "no storage"),
}


class Files(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.reader = hostile.Reader(PROGRAM)
        cls.addClassCleanup(cls.reader.__exit__)
        cls.sound = cls.folder / "sound"
        cls.digest = cls.reader.make(cls.sound, 1)

    def setUp(self):
        self.path = hostile.copy(self.sound, self.folder / "hostile")
        self.addCleanup(hostile.remove, self.path)

    def opened(self, name):
        """A file of the checkpoint, of its own, opened as HDF5 would write it here."""
        hostile.replace(self.path / name, (self.sound / name).read_bytes())
        return h5py.File(self.path / name, "r+", libver=("v110", "v110"))

    def seal(self, with_check=True):
        """Makes the index record the sizes of the files as they are, under a digest that is right."""
        columns = index_columns(self.path / INDEX)
        with h5py.File(self.path / INDEX, "r+", libver=("v110", "v110")) as file:
            shards = sorted(self.path.glob("shard-*"))
            file["/files/size"][...] = columns["/files/size"] = np.array([s.stat().st_size for s in shards], "<u8")
            if with_check:
                file["/check"][...] = index_check(columns)

    def expect(self, name, message):
        """How the checkpoint is refused; with None, not at all."""
        result = self.reader.read(self.path)
        self.assertIsNone(hostile.fault_of(result, self.digest, [name]), f"{result}{self.reader.complaints()[-4000:]}")
        if message is None:
            self.assertEqual((result["status"], result["verify"]), (hostile.LOADED, "valid"), result)
        else:
            self.assertEqual(result["status"], hostile.REFUSED, result)
            self.assertIn(message, result["error"])
            self.assertIn(message, result["verify"])
        self.assertLess(result["seconds"], 1)
        if not IS_SANITIZED:  # its shadow memory grows too
            self.assertLess(result["growth_kib"], 100 << 10, result)

    def test_a_file_that_python_rewrote_is_loaded(self):
        """Else nothing below would be about what it says."""
        for name, table in ((INDEX, "/table/shape_ptr"), (SHARD, "/table/arena_start")):
            with self.opened(name) as file:
                data = file[table][...]
                del file[table]
                dataset = put(file, table, data)
                self.assertIsNotNone(dataset.id.get_offset())
            self.seal(name == SHARD)
            self.expect(name, None)

    def test_datasets_that_are_not_plain(self):
        for name, table in ((INDEX, "/header"), (INDEX, "/files/ranks"), (SHARD, "/ranks"), (SHARD, "/table/arena_start")):
            for trick, (make, message) in TRICKS.items():
                with self.subTest(file=name, table=table, trick=trick):
                    with self.opened(name) as file:
                        data = file[table][...]
                        del file[table]
                        make(file, table, data)
                    if name == SHARD:
                        hostile.replace(self.path / INDEX, (self.sound / INDEX).read_bytes())
                        self.seal()
                    self.expect(name, message)
            hostile.replace(self.path / name, (self.sound / name).read_bytes())

    def test_tensor_data_that_are_not_plain(self):
        for trick in ("soft link", "external storage", "gzip", "virtual", "group", "huge extent", "not allocated"):
            with self.subTest(trick=trick):
                make, message = TRICKS[trick]
                with self.opened(SHARD) as file:
                    data = file["/data/i64"][...]
                    del file["/data/i64"]
                    make(file, "/data/i64", data)
                hostile.replace(self.path / INDEX, (self.sound / INDEX).read_bytes())
                self.seal()
                self.expect(SHARD, message)

    def test_groups_that_are_links(self):
        for name in (INDEX, SHARD):
            for link in (h5py.SoftLink("/real"), h5py.ExternalLink("other.h5", "/real")):
                with self.subTest(file=name, link=link):
                    with self.opened(name) as file:
                        file.move("/table", "/real")
                        file["/table"] = link
                    (self.path / "other.h5").unlink(missing_ok=True)
                    os.link(self.path / name, self.path / "other.h5")
                    if name == SHARD:
                        hostile.replace(self.path / INDEX, (self.sound / INDEX).read_bytes())
                        self.seal()
                    self.expect(name, "soft or external link")

    def test_datasets_that_are_one_another(self):
        """By hard links: each lies in the file, all of them would take more than the file."""
        columns = index_columns(self.path / INDEX)
        with self.opened(INDEX) as file:
            columns["/library"] = columns["/metadata"] = np.zeros(1 << 20, "u1")
            for name in ("/library", "/metadata"):
                del file[name]
            put(file, "/library", columns["/library"])
            file["/metadata"] = file["/library"]
            file["/check"][...] = index_check(columns)
        self.expect(INDEX, "overlap")

    def test_what_nobody_reads(self):
        """Groups nested 20,000 deep, cycles, a hundred thousand attributes' worth of bytes, dangling links."""
        for name in (INDEX, SHARD):
            with self.subTest(file=name):
                with self.opened(name) as file:
                    inner = file.id
                    for _ in range(20000):
                        inner = h5py.h5g.create(inner, b"g")
                    file["/table/up"] = file["/"]
                    file["/self"] = file["/"]
                    file["/lost"] = h5py.SoftLink("/lost")
                    file.attrs.create("much", np.zeros(1 << 20, "u1"))
                hostile.replace(self.path / INDEX, (self.path / INDEX).read_bytes())
                self.seal()
                self.expect(name, None)

    def test_text_is_carried_and_not_understood(self):
        """Metadata that are neither JSON nor UTF-8, the user's affair; a mesh named like a path."""
        for text in (b"{not json", b"\xff\xfe\x00\x1b[2J", b"\x00" * 100000, b"../../etc/passwd", b""):
            with self.subTest(text=text[:20]):
                columns = index_columns(self.sound / INDEX)
                with self.opened(INDEX) as file:
                    for name in ("/metadata", "/library"):
                        columns[name] = np.frombuffer(text, "u1")
                        del file[name]
                        put(file, name, columns[name])
                    file["/check"][...] = index_check(columns)
                self.expect(INDEX, None)

    def test_names_of_tensors_that_nobody_expects(self):
        """They are names of nothing but tensors: of no file, of no HDF5 object."""
        for text in (b"..", b"/", b"../../x", b"a\x00b", b"\xff", b"x" * 65536, b"%2F\x1b[2J"):
            with self.subTest(name=text[:20]):
                columns = index_columns(self.sound / INDEX)
                pointers = columns["/table/name_ptr"].astype(int)
                names = [columns["/table/name_bytes"][a:b].tobytes() for a, b in zip(pointers, pointers[1:])]
                # The first or the last in order, so that all others stay in theirs.
                place = 0 if text < names[1] else len(names) - 1
                if place and text < names[-2]:
                    continue
                names[place] = text
                columns["/table/name_ptr"] = np.cumsum([0, *map(len, names)], dtype="<u8")
                columns["/table/name_bytes"] = np.frombuffer(b"".join(names), "u1")
                with self.opened(INDEX) as file:
                    for name in ("/table/name_ptr", "/table/name_bytes"):
                        del file[name]
                        put(file, name, columns[name])
                    file["/check"][...] = index_check(columns)
                result = self.reader.read(self.path)
                self.assertEqual(result["status"], hostile.REFUSED, result)
                self.assertIn("MismatchError", result["error"])
                self.assertIn(str(self.path), result["error"])
                # The shard files know the tensor by its old name.
                self.assertIn("/table/name_bytes", result["verify"])
                self.assertEqual(sorted(self.folder.iterdir()), sorted([self.sound, self.path]))

    def test_versions_are_refused_by_name(self):
        for version in (0, 2, 2**63, 2**64 - 1):
            with self.subTest(version=version):
                columns = index_columns(self.sound / INDEX)
                columns["/header"][0] = version
                with self.opened(INDEX) as file:
                    file["/header"][0] = version
                    file["/check"][...] = index_check(columns)
                self.expect(INDEX, f"format version {version}")

    def test_superblocks(self):
        """Under a checksum that is right."""
        def forge(data, change):
            data = bytearray(data)
            change(data)
            data[44:48] = struct.pack("<I", lookup3(bytes(data[:44])))
            return bytes(data)

        def put_u64(position, value):
            return lambda data: data.__setitem__(slice(position, position + 8), struct.pack("<Q", value))

        def put_u8(position, value):
            return lambda data: data.__setitem__(position, value)

        whole = (self.sound / INDEX).read_bytes()
        self.assertEqual(forge(whole, lambda data: None), whole, "the checksum of this test")
        size = len(whole)
        for what, change, message in (
                ("version 2", put_u8(8, 2), "superblock of another version"),
                ("version 4", put_u8(8, 4), "superblock of another version"),
                ("offsets of 4 bytes", put_u8(9, 4), "superblock of another version"),
                ("lengths of 255 bytes", put_u8(10, 255), "superblock of another version"),
                ("open for writing", put_u8(11, 1), "H5Fopen"),
                ("open for SWMR", put_u8(11, 5), "H5Fopen"),
                ("base address", put_u64(12, 512), "base address"),
                ("extension at itself", put_u64(20, 0), "H5Fopen"),
                ("extension outside", put_u64(20, size), "H5Fopen"),
                ("extension far outside", put_u64(20, 2**63), "H5Fopen"),
                ("shorter", put_u64(28, size - 1), "truncated or extended"),
                ("longer", put_u64(28, 2**64 - 1), "truncated or extended"),
                ("root at the superblock", put_u64(36, 0), "H5Lexists"),
                ("root in data", put_u64(36, 4096), "H5Lexists"),
                ("root outside", put_u64(36, 2**63), "H5Lexists"),
                ("no root", put_u64(36, 2**64 - 1), "H5Lexists")):
            with self.subTest(what=what):
                hostile.replace(self.path / INDEX, forge(whole, change))
                self.expect(INDEX, message)


if __name__ == "__main__":
    unittest.main()
