#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Writes small checkpoints from checkpoints/FORMAT.md alone, to test readers with files that fsdp2 did not write.

It shares nothing with read_checkpoint.py and takes the slow, plain way everywhere: index lists instead of box
arithmetic, CRCs byte by byte. The same arguments give the same bytes (with the same HDF5).

    write_checkpoint.py OUT --sample NAME     writes the checkpoint OUT; samples: see SAMPLES below

The content of a tensor follows from its name, so that a reader in any language can tell what it must find: byte k of
its row-major bytes is byte k mod 8 (from the least significant) of splitmix64(fnv1a64(name) + k div 8), where
splitmix64(s) is the first output of that generator in the state s. Two exceptions: a bool keeps only the lowest bit of
each byte; and in a floating-point or complex tensor whose name begins with "nan." each element, or part of a complex
element, is or-ed with NAN_BITS of its type, which makes it a NaN of its own payload and sign, quiet or signalling.
"""

import argparse
import dataclasses
import itertools
import json
import math
from pathlib import Path

import h5py
import numpy as np

DTYPES = {  # name: (code, bytes)
    "f64": (1, 8), "f32": (2, 4), "f16": (3, 2), "bf16": (4, 2), "f8_e4m3": (5, 1), "f8_e5m2": (6, 1), "i64": (7, 8),
    "i32": (8, 4), "i16": (9, 2), "i8": (10, 1), "u64": (11, 8), "u32": (12, 4), "u16": (13, 2), "u8": (14, 1),
    "bool": (15, 1), "complex64": (16, 8), "complex128": (17, 16)}
NAN_BITS = {"f64": ("<u8", 0x7FF0000000000001), "f32": ("<u4", 0x7F800001), "f16": ("<u2", 0x7C01),
            "bf16": ("<u2", 0x7F81), "f8_e4m3": ("u1", 0x7F), "f8_e5m2": ("u1", 0x7D),
            "complex64": ("<u4", 0x7F800001), "complex128": ("<u8", 0x7FF0000000000001)}
BLOCK_BYTES = 4096
SEGMENT_ALIGN = 8192
SAVE_ID = "0123456789abcdeffedcba9876543210"
REPLICATE = ("R",)


def encoded(name):
    """Names are bytes; those that are no UTF-8 are as Python has them in file names."""
    return name.encode("utf-8", "surrogateescape")


@dataclasses.dataclass
class Mesh:
    name: str
    axes: list  # names
    sizes: list
    roles: list
    ranks: list = dataclasses.field(default_factory=list)  # empty: row-major

    def coordinates(self, rank):
        """Of a rank, None outside the mesh."""
        ranks = self.ranks or list(range(math.prod(self.sizes)))
        return dict(zip(ranks, itertools.product(*map(range, self.sizes)))).get(rank)


@dataclasses.dataclass
class Tensor:
    name: str
    dtype: str
    shape: tuple
    placements: list  # per axis: ("R",), ("S", dim) or ("G", dim, bounds)
    split_order: list
    mesh: int = 0

    @property
    def itemsize(self):
        return DTYPES[self.dtype][1]


def content(tensor):
    """The tensor's bytes, as uint8[shape + (itemsize,)]."""
    seed = 0xCBF29CE484222325
    for octet in encoded(tensor.name):
        seed = (seed ^ octet) * 0x100000001B3 % 2**64
    count = math.prod(tensor.shape) * tensor.itemsize
    z = np.arange(-(-count // 8), dtype=np.uint64) + np.uint64((seed + 0x9E3779B97F4A7C15) % 2**64)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    data = (z ^ z >> np.uint64(31)).view(np.uint8)[:count].copy()
    if tensor.dtype == "bool":
        data &= 1
    if tensor.name.startswith("nan.") and tensor.dtype in NAN_BITS:
        kind, bits = NAN_BITS[tensor.dtype]
        data.view(kind)[...] |= np.array(bits, kind)
    return data.reshape(tuple(tensor.shape) + (tensor.itemsize,))


# ---- §6 ----

CRC_TABLE = []
for value in range(256):
    for _ in range(8):
        value = value >> 1 ^ (0xC96C5795D7870F42 if value & 1 else 0)
    CRC_TABLE.append(value)


def feed(register, data):
    for octet in data:
        register = CRC_TABLE[(register ^ octet) & 255] ^ register >> 8
    return register


def crc(data):
    return feed(2**64 - 1, data) ^ 2**64 - 1


def shift(value, n):
    return feed(value, bytes(n))


def sealed(parts):
    return crc(b"".join(np.uint64(part.nbytes).tobytes() + part.tobytes() for part in parts))


def contribution(data, indices):
    """Each element is a run."""
    inside = np.zeros(data.shape[:-1], bool)
    inside[np.ix_(*indices)] = True
    result = 0
    for element, mine in zip(data.reshape(-1, data.shape[-1]), inside.reshape(-1)):
        result = shift(result, data.shape[-1]) ^ (crc(element.tobytes()) if mine else 0)
    return result


# ---- §3 and §4 ----


def box(tensor, mesh, at):
    """Per dimension, the list of the global indices held at the coordinates."""
    indices = [list(range(n)) for n in tensor.shape]
    for axis in tensor.split_order:
        kind, i = tensor.placements[axis], at[axis]
        if kind[0] == "S":
            own = indices[kind[1]]
            c = -(-len(own) // mesh.sizes[axis])
            indices[kind[1]] = own[i * c:(i + 1) * c]
        elif kind[0] == "G":
            indices[kind[1]] = [x for x in indices[kind[1]] if kind[2][i] <= x < kind[2][i + 1]]
    return indices


def pieces(rank, tensors, meshes, split):
    """(tensor, index lists) of what a rank writes, in the order of the tensors."""
    lines = {}
    for tensor in tensors:
        at = meshes[tensor.mesh].coordinates(rank)
        if at is not None:
            axes = tuple(axis for axis, kind in enumerate(tensor.placements) if kind == REPLICATE)
            lines.setdefault((tensor.mesh, axes), []).append((tensor, box(tensor, meshes[tensor.mesh], at)))
    result = {}
    for (number, axes), members in lines.items():
        mesh = meshes[number]
        at = mesh.coordinates(rank)
        replicas = list(itertools.product(*(range(mesh.sizes[axis]) for axis in axes)))
        R, m = len(replicas), replicas.index(tuple(at[axis] for axis in axes))
        sizes = [math.prod(map(len, indices)) * tensor.itemsize for tensor, indices in members]
        T, a = sum(sizes), 0
        lo, hi = (T // R * k + T % R * k // R for k in (m, m + 1))
        for (tensor, indices), b in zip(members, sizes):
            d = [len(own) > 1 for own in indices].index(True) if any(len(own) > 1 for own in indices) else None
            n = 1 if d is None else len(indices[d])

            def before(x):
                if b <= split or n == 1:
                    return n if 2 * (x - a) >= b else 0
                top = 2 * (x - a) + b // n
                return 0 if top < 0 else min(top // (2 * (b // n)), n)

            if b > 0 and before(lo) < before(hi):
                own = list(indices)
                if d is not None:
                    own[d] = own[d][before(lo):before(hi)]
                result[tensor.name] = (tensor, own)
            a += b
    return [result[tensor.name] for tensor in tensors if tensor.name in result]


# ---- HDF5 ----


def arena_type(dtype):
    if dtype == "bf16":
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_ebias(127)
        return kind
    numpy_type = {"f8_e4m3": "u1", "f8_e5m2": "u1", "bool": "?", "complex64": "<c8", "complex128": "<c16"}.get(
        dtype, f"<{dtype[0]}{DTYPES[dtype][1]}")
    return h5py.h5t.py_create(np.dtype(numpy_type), logical=True)


class File:
    """An HDF5 file as §7 wants it."""

    def __init__(self, path):
        access, create = h5py.h5p.create(h5py.h5p.FILE_ACCESS), h5py.h5p.create(h5py.h5p.FILE_CREATE)
        access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
        create.set_obj_track_times(False)
        self.id = h5py.h5f.create(str(path).encode(), h5py.h5f.ACC_EXCL, fcpl=create, fapl=access)
        self.groups = {"": self.id}

    def put(self, path, data, kind=None):
        """data: an array; as the raw bytes uint8[elements, itemsize] of the HDF5 type, if one is given."""
        parent, name = path.rsplit("/", 1)
        if parent not in self.groups:
            create = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
            create.set_obj_track_times(False)
            self.groups[parent] = h5py.h5g.create(self.id, parent.encode(), gcpl=create)
        create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        create.set_layout(h5py.h5d.CONTIGUOUS)
        create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        create.set_obj_track_times(False)
        shape = data.shape if kind is None else data.shape[:1]
        kind = kind or h5py.h5t.py_create(data.dtype)
        dataset = h5py.h5d.create(self.groups[parent], name.encode(), kind, h5py.h5s.create_simple(shape), dcpl=create)
        if data.size:
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(data), mtype=kind)

    def close(self):
        for group in self.groups.values():
            group.close()


def u64(values):
    return np.array([value % 2**64 for value in values], "<u8")


def i64(values):
    return np.array(values, "<i8")


def u8(values):
    """values: numbers or byte strings."""
    return np.frombuffer(b"".join(v if isinstance(v, bytes) else bytes([v]) for v in values), "u1")


def pointers(lists):
    return u64(itertools.accumulate(map(len, lists), initial=0))


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def up(value, multiple):
    return -(-value // multiple) * multiple


# ---- Files ----


def halves(save_id):
    return int(save_id[:16], 16), int(save_id[16:], 16)


def table_row(tensor, indices, arena_start, count, digest):
    return {"name": encoded(tensor.name), "dtype": DTYPES[tensor.dtype][0], "shape": tensor.shape,
            "offset": [own[0] for own in indices], "extent": [len(own) for own in indices],
            "arena_start": arena_start, "bytes": count, "digest": digest}


def write_shard(path, g, ranks, save_id, sample, digests):
    """Adds the contributions of the pieces to the digests. Returns, per rank, the segments for the index."""
    tensors = sorted(sample.tensors, key=lambda tensor: encoded(tensor.name))
    arenas = {dtype: bytearray() for dtype in DTYPES}
    rows, locals_, rank_rows = [], [], []
    for rank in ranks:
        row = [rank, len(rows), 0, sum(len(r["name"]) for r in rows), sum(len(r["shape"]) for r in rows),
               len(locals_), 0, sum(len(key) for key, _ in locals_), sum(len(value) for _, value in locals_)]
        start = {dtype: len(arena) for dtype, arena in arenas.items()}
        used = dict.fromkeys(DTYPES, 0)
        for tensor, indices in pieces(rank, tensors, sample.meshes, sample.split):
            arena, whole = arenas[tensor.dtype], content(tensor)
            arena += bytes(up(len(arena), 64) - len(arena))
            data = whole[np.ix_(*indices)].tobytes()
            rows.append(table_row(tensor, indices, len(arena), len(data), contribution(whole, indices)))
            digests[tensor.name] ^= rows[-1]["digest"]
            arena += data
            used[tensor.dtype] = len(arena) - start[tensor.dtype]
        for key in sorted(sample.rank_local.get(rank, {}), key=str.encode):
            locals_.append((key.encode(), sample.rank_local[rank][key]))
        row[2], row[6] = len(rows) - row[1], len(locals_) - row[5]
        for dtype, arena in arenas.items():
            arena += bytes(up(len(arena), SEGMENT_ALIGN) - len(arena))
            row += [start[dtype], used[dtype], len(arena) - start[dtype]]
        rank_rows.append(row)
    for row in rank_rows:
        for dtype, (code, _) in DTYPES.items():
            if not arenas[dtype]:
                row[9 + 3 * (code - 1)] = 0

    header = u64([1, sample.world_size, g, len(sample.file_ranks), len(ranks), sample.step, BLOCK_BYTES, SEGMENT_ALIGN,
                  sample.split, *halves(save_id), 0])
    blocks = {dtype: u64([crc(arena[i:i + BLOCK_BYTES]) for i in range(0, len(arena), BLOCK_BYTES)])
              for dtype, arena in arenas.items() if arena}
    column = {key: [row[key] for row in rows] for key in (
        "name", "dtype", "shape", "offset", "extent", "arena_start", "bytes", "digest")}
    keys, values = [key for key, _ in locals_], [value for _, value in locals_]
    data = {
        "/rank_local/name_bytes": u8(keys), "/rank_local/name_ptr": pointers(keys),
        "/rank_local/value_bytes": u8(values), "/rank_local/value_ptr": pointers(values),
        "/table/arena_start": u64(column["arena_start"]), "/table/bytes": u64(column["bytes"]),
        "/table/digest": u64(column["digest"]), "/table/dtype": u8(column["dtype"]),
        "/table/extent": i64(flat(column["extent"])), "/table/name_bytes": u8(column["name"]),
        "/table/name_ptr": pointers(column["name"]), "/table/offset": i64(flat(column["offset"])),
        "/table/shape": i64(flat(column["shape"])), "/table/shape_ptr": pointers(column["shape"])}

    def part(path, row):
        """What /check of the rank with this row of /ranks covers of a dataset."""
        first, count = (row[5], row[6]) if path.startswith("/rank_local") else (row[1], row[2])
        if path.endswith("_ptr"):
            return data[path][first:first + count + 1]
        pointer = {"name_bytes": "name_ptr", "value_bytes": "value_ptr", "shape": "shape_ptr", "offset": "shape_ptr",
                   "extent": "shape_ptr"}.get(path.split("/")[2])
        if pointer:
            bounds = data[path.rsplit("/", 1)[0] + "/" + pointer]
            return data[path][int(bounds[first]):int(bounds[first + count])]
        return data[path][first:first + count]

    check = []
    for row in rank_rows:
        own_blocks = []
        for dtype in sorted(blocks):
            start, _, length = row[9 + 3 * (DTYPES[dtype][0] - 1):][:3]
            own_blocks.append(blocks[dtype][start // BLOCK_BYTES:(start + length) // BLOCK_BYTES])
        check.append(sealed([header, u64(row), *own_blocks, *(part(path, row) for path in sorted(data))]))

    file = File(path)
    file.put("/header", header)
    file.put("/ranks", u64(flat(rank_rows)).reshape(len(ranks), 60))
    for dtype in blocks:
        file.put(f"/data/{dtype}", np.frombuffer(arenas[dtype], "u1").reshape(-1, DTYPES[dtype][1]), arena_type(dtype))
        file.put(f"/blocks/{dtype}", blocks[dtype])
    for name, values in data.items():
        file.put(name, values)
    file.put("/check", u64(check))
    file.close()
    return {row[0]: [(row[9 + 3 * k], row[11 + 3 * k]) for k in range(17)] for row in rank_rows}


def write_index(path, file_sizes, segments, save_id, sample, digests):
    tensors = sorted(sample.tensors, key=lambda tensor: encoded(tensor.name))
    names = [encoded(tensor.name) for tensor in tensors]
    meshes, file_ranks = sample.meshes, sample.file_ranks
    axes = flat([axis.encode() for axis in mesh.axes] for mesh in meshes)
    placements = flat(tensor.placements for tensor in tensors)
    bounds = sorted({tuple(kind[2]) for kind in placements if kind[0] == "G"})
    data = {
        "/files/rank_ptr": pointers(file_ranks), "/files/ranks": u64(flat(file_ranks)), "/files/size": u64(file_sizes),
        "/header": u64([1, sample.world_size, len(file_ranks), sample.step, BLOCK_BYTES, SEGMENT_ALIGN, sample.split,
                        *halves(save_id), len(tensors), len(meshes), 0]),
        "/library": u8([b"write_checkpoint.py"]),
        "/metadata": u8([json.dumps(sample.metadata).encode() if sample.metadata is not None else b""]),
        "/mesh/name_ptr": pointers([mesh.name.encode() for mesh in meshes]),
        "/mesh/name_bytes": u8([mesh.name.encode() for mesh in meshes]),
        "/mesh/axis_ptr": pointers([mesh.axes for mesh in meshes]),
        "/mesh/axis_name_ptr": pointers(axes), "/mesh/axis_name_bytes": u8(axes),
        "/mesh/axis_size": u64(flat(mesh.sizes for mesh in meshes)),
        "/mesh/axis_role": u8(flat(mesh.roles for mesh in meshes)),
        "/mesh/rank_ptr": pointers([mesh.ranks for mesh in meshes]),
        "/mesh/ranks": u64(flat(mesh.ranks for mesh in meshes)),
        "/segments": u64(flat(flat(segments[rank]) for rank in range(sample.world_size))).reshape(-1, 17, 2),
        "/table/name_ptr": pointers(names), "/table/name_bytes": u8(names),
        "/table/dtype": u8([DTYPES[tensor.dtype][0] for tensor in tensors]),
        "/table/shape_ptr": pointers([tensor.shape for tensor in tensors]),
        "/table/shape": i64(flat(tensor.shape for tensor in tensors)),
        "/table/mesh": u64([tensor.mesh for tensor in tensors]),
        "/table/placement_ptr": pointers([tensor.placements for tensor in tensors]),
        "/table/placement_kind": u8(["RSG".index(kind[0]) for kind in placements]),
        "/table/placement_dim": i64([0 if kind == REPLICATE else kind[1] for kind in placements]),
        "/table/placement_bounds": u64([bounds.index(tuple(kind[2])) if kind[0] == "G" else 0 for kind in placements]),
        "/table/split_order": u64(flat(tensor.split_order for tensor in tensors)),
        "/table/digest": u64([digests[tensor.name] for tensor in tensors]),
        "/ragged/bounds_ptr": pointers(bounds), "/ragged/bounds": i64(flat(bounds))}
    file = File(path)
    for name, values in data.items():
        file.put(name, values)
    file.put("/check", u64([sealed(data[name] for name in sorted(data))]))
    file.close()


@dataclasses.dataclass
class Sample:
    world_size: int
    meshes: list
    tensors: list
    file_ranks: list
    step: int = 100
    split: int = 128  # small, so that small tensors are cut too
    metadata: object = None
    rank_local: dict = dataclasses.field(default_factory=dict)


def check_digests(sample, digests):
    for tensor in sample.tensors:
        if digests[tensor.name] != crc(content(tensor).tobytes()):
            raise AssertionError(f"the contributions to {tensor.name} do not add up to the CRC of its bytes")


def write(path, sample, save_id=SAVE_ID):
    """save_id: 32 lower-case hexadecimal digits."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists")
    partial = path.parent / f".{path.name}.partial-{save_id}"
    partial.mkdir()
    digests = {tensor.name: 0 for tensor in sample.tensors}
    segments, sizes = {}, []
    for g, ranks in enumerate(sample.file_ranks):
        shard = partial / f"shard-{g:05d}-of-{len(sample.file_ranks):05d}.h5"
        segments.update(write_shard(shard, g, ranks, save_id, sample, digests))
        sizes.append(shard.stat().st_size)
    check_digests(sample, digests)
    write_index(partial / "index.h5", sizes, segments, save_id, sample, digests)
    partial.rename(path)


# ---- Samples ----

SHAPES = [(), (0,), (1,), (5, 17), (3, 0, 5)]


def label(shape):
    return "x".join(map(str, shape)) or "scalar"


def kinds(shape):
    return [REPLICATE, *(("S", d) for d in range(min(2, len(shape))))]


def dp3():
    """Three ranks, one axis, a file per rank. <dtype>.<shape>.<placement>: all dtypes and shapes, the placements in
    turn; f32 and bf16 in all placements; NaNs of all dtypes that have them."""
    tensors = []

    def add(name, dtype, shape, kind):
        tensors.append(Tensor(name + "".join(map(str, kind)), dtype, shape, [kind], [0]))

    for i, dtype in enumerate(DTYPES):
        for j, shape in enumerate(SHAPES):
            some = kinds(shape)
            for kind in some if dtype in ("f32", "bf16") else [some[(i + j) % len(some)]]:
                add(f"{dtype}.{label(shape)}.", dtype, shape, kind)
        if dtype in NAN_BITS:
            add(f"nan.{dtype}.5x17.", dtype, (5, 17), ("S", i % 2))
    add("odd/n\u00e4me %\u2713.", "f32", (7,), ("S", 0))
    return Sample(3, [Mesh("mesh", ["dp"], [3], [1])], tensors, [[0], [1], [2]], metadata={"lr": 0.5, "text": "\u00e4"},
                  rank_local={1: {"rng": b"state of rank 1"}, 2: {"empty": b"", "rng": b"state of rank 2"}})


def grid_tensors(dtypes, mesh=0):
    """<dtype>.<shape>.<placement on dp>.<placement on tp>.<split order>: all shapes, placements and split orders."""
    for dtype in dtypes:
        for shape in SHAPES:
            for dp, tp in itertools.product(kinds(shape), repeat=2):
                for order in ([0, 1], [1, 0]) if dp == tp != REPLICATE else ([0, 1],):
                    name = ".".join([dtype, label(shape), *("".join(map(str, kind)) for kind in (dp, tp)),
                                     "".join(map(str, order))])
                    yield Tensor(name, dtype, shape, [dp, tp], order, mesh)


def grid():
    """Four ranks as (dp=2, tp=2), a file per rank: everything that two axes can do to a tensor."""
    tensors = list(grid_tensors(["f32", "bf16", "u8", "complex128"]))
    return Sample(4, [Mesh("mesh", ["dp", "tp"], [2, 2], [1, 0])], tensors, [[0], [1], [2], [3]])


def mixed():
    """Six ranks in two files that do not hold them in order; one mesh in order, one by a rank list without rank 1;
    ragged tensors, alone and cut once more; a negative step; tensors cut only if they have more than 4 MiB."""
    tensors = [Tensor(name=f"row.{t.name}", dtype=t.dtype, shape=t.shape, placements=t.placements,
                      split_order=t.split_order) for t in grid_tensors(["f32", "i16"])]
    tensors += [
        Tensor("ragged.dp", "f64", (5, 17), [("G", 1, (0, 3, 3, 17)), REPLICATE], [0, 1]),
        Tensor("ragged.tp", "f16", (5, 17), [REPLICATE, ("G", 0, (0, 4, 5))], [0, 1]),
        Tensor("ragged.both", "bf16", (5, 17), [("G", 1, (0, 3, 3, 17)), ("S", 1)], [0, 1]),
        Tensor("ragged.same", "i8", (17,), [("G", 0, (0, 3, 3, 17)), ("S", 0)], [0, 1]),
        Tensor("list.a", "f32", (7, 3), [("S", 0)], [0], 1),
        Tensor("list.b", "bool", (7, 3), [REPLICATE], [0], 1)]
    meshes = [Mesh("row", ["dp", "tp"], [3, 2], [1, 2]), Mesh("list", ["x"], [5], [0], [4, 0, 5, 2, 3])]
    return Sample(6, meshes, tensors, [[0, 3, 1], [5, 4, 2]], step=-7, split=1 << 22,
                  rank_local={3: {"b": b"3b", "a": b"3a"}, 4: {"a": b"4"}})


def empty():
    """One rank, one mesh, no tensors."""
    return Sample(1, [Mesh("mesh", ["dp"], [1], [1])], [], [[0]], step=0)


def names():
    """Two ranks, names that file formats stumble over, much metadata."""
    odd = ["\0", "\0a\0", "\t\n", ".", "..", "../up", "/", "//", "a", "a\0b", "a/b", "a/b/", "a\\b", "%2F", 300 * "n", "\x7f", "\u00e4",
           "\u6a21\u578b", "\U0001f9e0", "\udcff\udcfe"]
    return Sample(2, [Mesh("m/%", ["d p"], [2], [1])], [Tensor(name, "u8", (3,), [("S", 0)], [0]) for name in odd], [[0], [1]],
                  metadata={"text": 70000 * "m"})


SAMPLES = {"dp3": dp3, "grid": grid, "mixed": mixed, "empty": empty, "names": names}


def main():
    parser = argparse.ArgumentParser(description="Writes a sample checkpoint by FORMAT.md, without fsdp2.")
    parser.add_argument("out", metavar="OUT", help="the directory to write; it must not exist")
    parser.add_argument("--sample", choices=SAMPLES, default="dp3", help="; ".join(
        f"{name}: {' '.join(make.__doc__.split())}" for name, make in SAMPLES.items()))
    parser.add_argument("--save-id", default=SAVE_ID, help="32 lower-case hexadecimal digits (default: %(default)s)")
    options = parser.parse_args()
    write(options.out, SAMPLES[options.sample](), options.save_id)


if __name__ == "__main__":
    main()
