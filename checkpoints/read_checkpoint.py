#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Reads fsdp2 checkpoints with h5py and numpy alone, by FORMAT.md beside this file (§: its sections).

    checkpoint = Checkpoint("step-00000100")
    checkpoint.step, checkpoint.save_id, checkpoint.world_size, checkpoint.metadata, checkpoint.meshes
    for name, tensor in checkpoint.tensors.items():
        print(name, tensor.dtype, tensor.shape, tensor.placements, f"{tensor.digest:016x}")
    weight = checkpoint.read("layer.weight")                                  # the whole tensor, bit for bit
    corner = checkpoint.read("layer.weight", box=((0, 0), (16, 16)))          # (offset, extent)
    values = to_float32(checkpoint.read("layer.bias"), "bf16")                # numpy has no bf16 and no float8
    checkpoint.verify()                                                       # every byte of every file

Whatever is wrong with a checkpoint raises InvalidCheckpoint, whose message names the file and the tensor; a path
without a checkpoint raises NoCheckpoint, and another format version UnknownVersion. All three are CheckpointErrors.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
from pathlib import Path

import h5py
import numpy as np

if sys.byteorder != "little":
    raise ImportError("read_checkpoint.py views little-endian bytes in place: it needs a little-endian machine")

VERSION = 1
# §2: code → name and the numpy type that holds the bits. bf16 and float8 stay raw bits: see to_float32().
DTYPES = dict(enumerate(
    [("f64", "<f8"), ("f32", "<f4"), ("f16", "<f2"), ("bf16", "<u2"), ("f8_e4m3", "u1"), ("f8_e5m2", "u1"),
     ("i64", "<i8"), ("i32", "<i4"), ("i16", "<i2"), ("i8", "i1"), ("u64", "<u8"), ("u32", "<u4"), ("u16", "<u2"),
     ("u8", "u1"), ("bool", "?"), ("complex64", "<c8"), ("complex128", "<c16")], start=1))
REPLICATE, SHARD, RAGGED = 0, 1, 2


class CheckpointError(Exception):
    """What every error of this module is."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint at the path."""


class UnknownVersion(CheckpointError):
    """The checkpoint has a format version that this program does not know."""


class InvalidCheckpoint(CheckpointError):
    """The checkpoint is damaged or incomplete, or its parts do not belong together."""


def require(condition, message):
    if not condition:
        raise InvalidCheckpoint(message)


def to_float32(array, dtype):
    """The float32 values of an array that read() returned for a floating-point dtype, such as "bf16" or "f8_e4m3"."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "f8_e5m2":
        return (array.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "f8_e4m3":  # bias 7, no infinities, NaN only where all other bits are set; f16 has bias 15
        wide = array.astype(np.uint16)
        values = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(np.float16).astype(np.float32) * np.float32(256)
        return np.where((wide & 0x7F) == 0x7F, np.float32(np.nan), values)
    return array.astype(np.float32)


# ---- §6, digests: polynomials over GF(2) modulo that of CRC-64/XZ, as 64-bit words of which bit 63 is x^0 ----

POLYNOMIAL = 0xC96C5795D7870F42  # 0x42f0e1eba9ea3693 in this representation; x^64 is implied
ONES = 2**64 - 1


def times_x(word):
    return word >> 1 ^ (POLYNOMIAL if word & 1 else 0)


def multiply(a, b):
    product = 0
    for bit in reversed(range(64)):
        if a >> bit & 1:
            product ^= b
        b = times_x(b)
    return product


@functools.lru_cache(maxsize=None)
def power(n):
    """x^(8n)."""
    if n <= 1:
        return 1 << 63 - 8 * n
    half = power(n // 2)
    return multiply(multiply(half, half), power(n % 2))


def shift(crc, n):
    """What CRC(A) contributes to CRC(AB), where n is the number of bytes of B."""
    return multiply(crc, power(n))


@functools.lru_cache(maxsize=1024)
def multiplication_table(factor):
    """uint64[8, 256]: [k, v] is the factor times the word whose byte k is v and whose other bytes are 0."""
    table = np.zeros((8, 256), np.uint64)
    for bit in reversed(range(64)):
        low = 1 << bit % 8
        table[bit // 8, low::2 * low] = table[bit // 8, ::2 * low] ^ np.uint64(factor)
        factor = times_x(factor)
    return table


def times(words, factor):
    """Each of the words times the factor."""
    table = multiplication_table(factor)
    split = np.asarray(words, order="C")[..., np.newaxis].view(np.uint8)
    product = table[0][split[..., 0]]
    for k in range(1, 8):
        product ^= table[k][split[..., k]]
    return product


def fold(words, step):
    """words: uint64[..., n], n > 0. The sum over i of words[..., i] · x^(8·step·(n−1−i)).

    Each round joins all pairs of neighbours at once, so that numpy always works on long arrays.
    """
    while words.shape[-1] > 1:
        if words.shape[-1] % 2:
            words = np.concatenate([np.zeros_like(words[..., :1]), words], axis=-1)
        words = times(words[..., 0::2], power(step)) ^ words[..., 1::2]
        step *= 2
    return words[..., 0]


def crc64(data):
    """data: bytes or uint8[..., n]. The CRC-64/XZ of each row, as uint64[...]."""
    data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    n = data.shape[-1]
    # Zeros in front change no remainder: the initial value, which would, is added in the end.
    padded = np.zeros(data.shape[:-1] + (max(8, n + -n % 8),), np.uint8)
    padded[..., padded.shape[-1] - n:] = data
    return times(fold(padded.view("<u8"), 8), power(8)) ^ np.uint64(shift(ONES, n) ^ ONES)


def digest_of(data, chunk=1 << 20):
    """data: uint8[n]. Its CRC as an int, in chunks that stay in the cache."""
    crc = 0
    for first in range(0, len(data), chunk):
        part = data[first:first + chunk]
        crc = shift(crc, len(part)) ^ int(crc64(part))
    return crc


def contribution(data, shape, offset, extent, itemsize):
    """data: the bytes of the box (offset, extent) of a tensor of that shape. What they contribute to its digest."""
    if not shape:
        return int(crc64(data))
    stride = [itemsize * math.prod(shape[d + 1:]) for d in range(len(shape))]
    crcs = crc64(data.reshape(extent[:-1] + (extent[-1] * itemsize,)))  # of each run along the last dimension
    for d in reversed(range(len(shape) - 1)):
        crcs = fold(crcs, stride[d])
    return shift(int(crcs), sum(b * (n - o - e) for b, n, o, e in zip(stride, shape, offset, extent)))


def sealed(parts):
    """The CRC of a sequence of arrays, each preceded by its length in bytes."""
    return int(crc64(b"".join(np.uint64(part.nbytes).tobytes() + part.tobytes() for part in parts)))


assert crc64(b"123456789") == 0x995DC9BBDF1939FA


# ---- HDF5 ----


@contextlib.contextmanager
def opened(path):
    """An HDF5 file to read. What goes wrong inside of it is the file's fault, and is reported as such."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except PermissionError:
        raise
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise InvalidCheckpoint(f"{path}: is not as the format wants it ({error})") from error


def find(file, path, kind, ndim=1):
    """The dataset at a path, if it is of the type (a numpy or HDF5 type) and of the make that §7 wants."""
    where = f"{file.filename}: {path}"
    found = file
    for part in path.strip("/").split("/"):
        require(isinstance(found, h5py.Group) and part in found, f"{where} is missing")
        require(isinstance(found.get(part, getlink=True), h5py.HardLink), f"{where} is not a hard link")
        found = found[part]
    require(isinstance(found, h5py.Dataset) and found.ndim == ndim, f"{where} is no dataset of {ndim} dimensions")
    kind = kind if isinstance(kind, h5py.h5t.TypeID) else h5py.h5t.py_create(np.dtype(kind))
    require(found.id.get_type() == kind, f"{where} has another type than the format gives it")
    layout = found.id.get_create_plist()
    require(layout.get_layout() == h5py.h5d.CONTIGUOUS and layout.get_external_count() == layout.get_nfilters() == 0,
            f"{where} is not stored contiguously in the file")
    return found


def load(file, path, kind, ndim=1):
    return find(file, path, kind, ndim)[...]


def arena_type(code):
    """The HDF5 type of an arena (§2)."""
    name, bits = DTYPES[code]
    if name != "bf16":
        return h5py.h5t.py_create(np.dtype(bits), logical=True)
    bf16 = h5py.h5t.IEEE_F32LE.copy()
    bf16.set_fields(15, 7, 8, 0, 7)
    bf16.set_size(2)
    bf16.set_ebias(127)
    return bf16


def check_superblock(path):
    """§7: version 3, and the file ends where its superblock says."""
    superblock = np.fromfile(path, np.uint8, 36).tobytes()
    end, size = int.from_bytes(superblock[28:], "little"), path.stat().st_size
    require(superblock[8] == 3 and end == size,
            f"{path}: superblock of version {superblock[8]}, not 3, or for {end} bytes where the file has {size}")


def rows(pointer, *columns):
    """Row i is entries [pointer[i], pointer[i+1]) of each of the columns."""
    bounds = pointer.tolist()
    if not bounds or bounds[0] != 0 or bounds != sorted(bounds) or any(bounds[-1] != len(c) for c in columns):
        raise ValueError("a _ptr column does not fit what it points into")
    return [tuple(column[a:b] for column in columns) for a, b in zip(bounds, bounds[1:])]


def octets(data, column):
    """The byte strings in the columns <column>_ptr and <column>_bytes."""
    return [row.tobytes() for row, in rows(data[column + "_ptr"], data[column + "_bytes"])]


def text(name):
    return name.decode("utf-8", "surrogateescape")  # names are bytes, and UTF-8 only by custom


def up(value, multiple):
    return -(-value // multiple) * multiple


# ---- §3, who holds what ----


@dataclasses.dataclass
class Mesh:
    number: int
    name: str
    axes: list  # names
    sizes: list
    roles: list  # per axis: 0 none, 1 FSDP shards over it, 2 FSDP replicates over it
    ranks: list  # world rank of each row-major index

    @functools.cached_property
    def coordinates(self):
        """World rank → index on each axis. Ranks outside the mesh are absent."""
        return dict(zip(self.ranks, np.ndindex(*self.sizes)))


@dataclasses.dataclass
class Placement:
    kind: int
    dim: int
    bounds: list  # of Ragged

    def __str__(self):
        return ("Replicate" if self.kind == REPLICATE else f"Shard({self.dim})" if self.kind == SHARD else
                f"Ragged({self.dim}, {self.bounds})")


@dataclasses.dataclass
class Tensor:
    name: str
    code: int  # of the dtype (§2)
    shape: tuple
    mesh: Mesh
    axis_placements: list
    split_order: list
    digest: int

    def __post_init__(self):
        self.dtype, bits = DTYPES[self.code]
        self.numpy_dtype = np.dtype(bits)
        self.itemsize = self.numpy_dtype.itemsize

    @property
    def placements(self):
        """Such as "mesh(dp=2: Shard(0), tp=2: Replicate)", with the split order if it is not that of the axes."""
        axes = zip(self.mesh.axes, self.mesh.sizes, self.axis_placements)
        order = [self.mesh.axes[axis] for axis in self.split_order]
        return (f"{self.mesh.name}({', '.join(f'{axis}={size}: {placement}' for axis, size, placement in axes)})"
                + (f" split {', '.join(order)}" if order != self.mesh.axes else ""))

    def is_sound(self):
        """Whether shape, placements and split order are what §3 allows."""
        if min(self.shape, default=0) < 0 or sorted(self.split_order) != list(range(len(self.mesh.sizes))):
            return False
        cut = set()
        for axis in self.split_order:
            placement = self.axis_placements[axis]
            if placement.kind != REPLICATE:
                if placement.kind not in (SHARD, RAGGED) or not 0 <= placement.dim < len(self.shape):
                    return False
                bounds = placement.bounds
                if placement.kind == RAGGED and (
                        placement.dim in cut or len(bounds) != self.mesh.sizes[axis] + 1 or bounds != sorted(bounds)
                        or (bounds[0], bounds[-1]) != (0, self.shape[placement.dim])):
                    return False
                cut.add(placement.dim)
        return True

    def box(self, rank):
        """§3: offset and extent of what a rank of the mesh holds."""
        offset, extent = [0] * len(self.shape), list(self.shape)
        for axis in self.split_order:
            i, placement = self.mesh.coordinates[rank][axis], self.axis_placements[axis]
            if placement.kind == REPLICATE:
                continue
            e = extent[placement.dim]
            c = -(-e // self.mesh.sizes[axis])
            first, last = min(i * c, e), min((i + 1) * c, e)
            if placement.kind == RAGGED:
                first, last = placement.bounds[i:i + 2]
            offset[placement.dim] += first
            extent[placement.dim] = last - first
        return offset, extent


@dataclasses.dataclass
class Piece:
    tensor: Tensor
    file: int
    offset: tuple
    extent: tuple
    start: int  # first byte, in the arena of its dtype

    def __post_init__(self):
        self.bytes = math.prod(self.extent) * self.tensor.itemsize


# ---- The checkpoint ----

INDEX_FILE = {  # §8, in bytewise order of paths
    "/files/rank_ptr": "<u8", "/files/ranks": "<u8", "/files/size": "<u8", "/header": "<u8", "/library": "u1",
    "/mesh/axis_name_bytes": "u1", "/mesh/axis_name_ptr": "<u8", "/mesh/axis_ptr": "<u8", "/mesh/axis_role": "u1",
    "/mesh/axis_size": "<u8", "/mesh/name_bytes": "u1", "/mesh/name_ptr": "<u8", "/mesh/rank_ptr": "<u8",
    "/mesh/ranks": "<u8", "/metadata": "u1", "/ragged/bounds": "<i8", "/ragged/bounds_ptr": "<u8", "/segments": "<u8",
    "/table/digest": "<u8", "/table/dtype": "u1", "/table/mesh": "<u8", "/table/name_bytes": "u1",
    "/table/name_ptr": "<u8", "/table/placement_bounds": "<u8", "/table/placement_dim": "<i8",
    "/table/placement_kind": "u1", "/table/placement_ptr": "<u8", "/table/shape": "<i8", "/table/shape_ptr": "<u8",
    "/table/split_order": "<u8"}


class Checkpoint:
    """A checkpoint whose index has been checked. Shard files are checked when they are first needed."""

    def __init__(self, path):
        self.path = Path(path)
        index = self.path / "index.h5"
        if self.path.resolve().name.startswith("."):
            raise NoCheckpoint(f"{path}: no checkpoint: names that begin with '.' are of unfinished or discarded ones")
        if not index.is_file():
            raise NoCheckpoint(f"{path}: no checkpoint: there is no file index.h5 in it")
        with opened(index) as file:
            version = load(file, "/header", "<u8")[0]
            if version != VERSION:
                raise UnknownVersion(f"{index}: format version {version}; this program knows version {VERSION}")
            data = {p: load(file, p, kind, ndim=3 if p == "/segments" else 1) for p, kind in INDEX_FILE.items()}
            require(load(file, "/check", "<u8").tolist() == [sealed(data.values())],
                    f"{index}: the file is damaged: /check does not match")
            self._parse(index, data)
        self._shards = {}

    def _parse(self, index, data):
        (_, self.world_size, files, step, self.block_bytes, self.segment_align, self.split, high, low, tensors, meshes,
         _) = data["/header"].tolist()
        self.step = step - (step >> 63 << 64)
        self.save_id = f"{high:016x}{low:016x}"
        self.library = data["/library"].tobytes().decode()
        self.metadata = json.loads(data["/metadata"].tobytes()) if data["/metadata"].size else None
        require(self.block_bytes >= 4096 and self.segment_align % self.block_bytes == 0
                and all(n & n - 1 == 0 for n in (self.block_bytes, self.segment_align)),
                f"{index}: block_bytes {self.block_bytes} and segment_align {self.segment_align} are not allowed")
        self.file_sizes = data["/files/size"].tolist()
        self.file_ranks = [ranks.tolist() for ranks, in rows(data["/files/rank_ptr"], data["/files/ranks"])]
        require(len(self.file_sizes) == len(self.file_ranks) == files
                and sorted(sum(self.file_ranks, [])) == list(range(self.world_size)),
                f"{index}: /files does not give every rank one file")
        self.segments = data["/segments"].tolist()
        require(data["/segments"].shape == (self.world_size, 17, 2), f"{index}: /segments does not fit the world size")

        self.meshes = []
        axes = rows(data["/mesh/axis_ptr"], [text(name) for name in octets(data, "/mesh/axis_name")],
                    data["/mesh/axis_size"].tolist(), data["/mesh/axis_role"].tolist())
        for name, (axis_names, sizes, roles), (ranks,) in zip(
                octets(data, "/mesh/name"), axes, rows(data["/mesh/rank_ptr"], data["/mesh/ranks"]), strict=True):
            ranks = ranks.tolist() or list(range(math.prod(sizes)))
            require(len(set(ranks)) == len(ranks) == math.prod(sizes) > 0 and max(ranks) < self.world_size,
                    f"{index}: mesh {text(name)}: axes of sizes {sizes} do not fit its ranks")
            self.meshes.append(Mesh(len(self.meshes), text(name), axis_names, sizes, roles, ranks))

        ragged = [bounds.tolist() for bounds, in rows(data["/ragged/bounds_ptr"], data["/ragged/bounds"])]
        keys = octets(data, "/table/name")
        require((len(keys), len(self.meshes)) == (tensors, meshes) and keys == sorted(set(keys)) and b"" not in keys,
                f"{index}: wrong number of tensors or meshes, or tensors not in bytewise order of unique names")
        per_axis = [data[f"/table/{column}"].tolist()
                    for column in ("placement_kind", "placement_dim", "placement_bounds", "split_order")]
        self.tensors = {}
        for key, code, (shape,), mesh, (kinds, dims, bounds, order), digest in zip(
                keys, data["/table/dtype"].tolist(), rows(data["/table/shape_ptr"], data["/table/shape"]),
                data["/table/mesh"].tolist(), rows(data["/table/placement_ptr"], *per_axis),
                data["/table/digest"].tolist(), strict=True):
            placements = [Placement(kind, dim, ragged[row] if kind == RAGGED else None)
                          for kind, dim, row in zip(kinds, dims, bounds)]
            tensor = Tensor(text(key), code, tuple(shape.tolist()), self.meshes[mesh], placements, order, digest)
            require(tensor.is_sound(), f"{index}: tensor {tensor.name}: shape or placements are not allowed")
            self.tensors[tensor.name] = tensor

    def _boxes(self, rank):
        """§4: tensor, offset and extent of each piece that a rank writes, in name order."""
        total, held = {}, []
        for tensor in self.tensors.values():
            if rank in tensor.mesh.coordinates:
                offset, extent = tensor.box(rank)
                b = math.prod(extent) * tensor.itemsize
                C = tensor.mesh.number, *(axis for axis, p in enumerate(tensor.axis_placements) if p.kind == REPLICATE)
                held.append((tensor, offset, extent, b, C, total.get(C, 0)))
                total[C] = total.get(C, 0) + b
        for tensor, offset, extent, b, C, a in held:
            R, m, T = 1, 0, total[C]
            for axis in C[1:]:
                R, m = R * tensor.mesh.sizes[axis], m * tensor.mesh.sizes[axis] + tensor.mesh.coordinates[rank][axis]
            d = next((d for d, e in enumerate(extent) if e > 1), None)
            n = 1 if d is None else extent[d]

            def before(m):
                x = T // R * m + T % R * m // R
                if b <= self.split or n == 1:
                    return n if 2 * (x - a) >= b else 0
                return min(max((2 * (x - a) + b // n) // (2 * (b // n)), 0), n)

            first, last = before(m), before(m + 1)
            if b > 0 and first < last:
                if d is not None:
                    offset[d], extent[d] = offset[d] + first, last - first
                yield tensor, tuple(offset), tuple(extent)

    @functools.cached_property
    def pieces(self):
        """Per rank: its pieces, where §5 puts them, and its segments as (start, used, length) by dtype code."""
        result = [None] * self.world_size
        for file, ranks in enumerate(self.file_ranks):
            start = dict.fromkeys(DTYPES, 0)
            for rank in ranks:
                pieces, used = [], dict.fromkeys(DTYPES, 0)
                for tensor, offset, extent in self._boxes(rank):
                    code = tensor.code
                    pieces.append(Piece(tensor, file, offset, extent, start[code] + up(used[code], 64)))
                    used[code] = pieces[-1].start + pieces[-1].bytes - start[code]
                segments = {code: (start[code], used[code], up(used[code], self.segment_align)) for code in DTYPES}
                result[rank] = pieces, segments
                start = {code: first + length for code, (first, _, length) in segments.items()}
        return result

    @functools.cached_property
    def _pieces_of(self):
        """Tensor name → its pieces."""
        result = {name: [] for name in self.tensors}
        for pieces, _ in self.pieces:
            for piece in pieces:
                result[piece.tensor.name].append(piece)
        return result

    def shard(self, g):
        """Shard file g, checked."""
        if g not in self._shards:
            self._shards[g] = Shard(self, g)
        return self._shards[g]

    def read(self, name, box=None):
        """The whole tensor, or the box (offset, extent) of it, as a numpy array of tensor.numpy_dtype.

        The CRCs of all blocks that are read and, of a whole tensor, the content digest are checked.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        tensor = self.tensors[name]
        offset, extent = ((0,) * len(tensor.shape), tensor.shape) if box is None else map(tuple, box)
        if not len(offset) == len(extent) == len(tensor.shape) or not all(
                0 <= o <= o + e <= n for o, e, n in zip(offset, extent, tensor.shape)):
            raise CheckpointError(f"{self.path}: tensor {name}: no box {offset}, {extent} in the shape {tensor.shape}")
        result = np.zeros(extent + (tensor.itemsize,), np.uint8)  # bytes: copies of numbers may change NaN payloads
        for piece in self._pieces_of[name]:
            ends = [(max(o, p), min(o + e, p + q)) for o, e, p, q in zip(offset, extent, piece.offset, piece.extent)]
            if all(first < last for first, last in ends):
                data = self.shard(piece.file).read(tensor.code, piece.start, piece.bytes, f"tensor {name}")
                source, target = (tuple(slice(a - o, b - o) for (a, b), o in zip(ends, base))
                                  for base in (piece.offset, offset))
                result[target] = data.reshape(piece.extent + (tensor.itemsize,))[source]
        result = result.reshape(-1)
        if box is None:
            digest = digest_of(result)
            require(digest == tensor.digest, f"{self.path}: tensor {name}: its bytes have the digest {digest:016x}, "
                                             f"the index says {tensor.digest:016x}")
        return result.view(tensor.numpy_dtype).reshape(extent)

    def rank_local(self, rank):
        """The opaque values that a rank saved for itself: name → bytes."""
        return next(self.shard(g).rank_local[rank] for g, ranks in enumerate(self.file_ranks) if rank in ranks)

    def verify(self):
        """Checks every file, every block, every pad, every digest, and that the pieces tile the tensors."""
        check_superblock(self.path / "index.h5")
        digests = dict.fromkeys(self.tensors, 0)
        for g in range(len(self.file_ranks)):
            self.shard(g).verify(digests)
        for name, tensor in self.tensors.items():
            times_written = np.zeros(tensor.shape, np.uint8)
            for piece in self._pieces_of[name]:
                times_written[tuple(slice(o, o + e) for o, e in zip(piece.offset, piece.extent))] += 1
            require((times_written == 1).all(), f"{self.path}: tensor {name}: its pieces do not tile it")
            require(digests[name] == tensor.digest, f"{self.path}: tensor {name}: its pieces have the digest "
                                                    f"{digests[name]:016x}, the index says {tensor.digest:016x}")


SHARD_FILE = {  # §7: path → type, and the column of /ranks that says where a rank's part begins; in the order of /check
    "/rank_local/name_bytes": ("u1", 7), "/rank_local/name_ptr": ("<u8", 5), "/rank_local/value_bytes": ("u1", 8),
    "/rank_local/value_ptr": ("<u8", 5), "/table/arena_start": ("<u8", 1), "/table/bytes": ("<u8", 1),
    "/table/digest": ("<u8", 1), "/table/dtype": ("u1", 1), "/table/extent": ("<i8", 4), "/table/name_bytes": ("u1", 3),
    "/table/name_ptr": ("<u8", 1), "/table/offset": ("<i8", 4), "/table/shape": ("<i8", 4),
    "/table/shape_ptr": ("<u8", 1)}


class Shard:
    """A shard file that has passed /check and is what the index says it is."""

    def __init__(self, checkpoint, g):
        self.checkpoint, self.ranks, size = checkpoint, checkpoint.file_ranks[g], checkpoint.file_sizes[g]
        self.path = checkpoint.path / f"shard-{g:05}-of-{len(checkpoint.file_ranks):05}.h5"
        require(self.path.is_file(), f"{self.path}: the file is missing")
        self._require(self.path.stat().st_size == size, f"has {self.path.stat().st_size} bytes, the index says {size}")
        with opened(self.path) as file:
            header, ranks = load(file, "/header", "<u8"), load(file, "/ranks", "<u8", ndim=2)
            self._check_header(g, header.tolist())
            self._require(ranks.shape == (len(self.ranks), 60), "/ranks has another shape than it must")
            codes = [code for code, (name, _) in DTYPES.items() if name in file.get("/blocks", ())]
            self.blocks = {code: load(file, f"/blocks/{DTYPES[code][0]}", "<u8") for code in codes}
            data = {path: load(file, path, kind) for path, (kind, _) in SHARD_FILE.items()}
            for i, (rank, check) in enumerate(zip(self.ranks, load(file, "/check", "<u8").tolist(), strict=True)):
                self._require(check == sealed(self._parts(i, header, ranks.tolist(), data)),
                              f"the file is damaged: /check of rank {rank} does not match")
            self._compare(ranks.tolist(), data)
            self._require(set(file.get("/data", ())) == {DTYPES[code][0] for code in codes}, "/data and /blocks differ")
            self.offsets = {}
            for code, blocks in self.blocks.items():
                arena = find(file, f"/data/{DTYPES[code][0]}", arena_type(code))
                self.offsets[code], length = arena.id.get_offset(), arena.id.get_storage_size()
                self._require(length == len(blocks) * checkpoint.block_bytes and self.offsets[code] + length <= size,
                              f"{arena.name} has another length than its blocks, or is not inside the file")

    def _require(self, condition, message):
        require(condition, f"{self.path}: {message}")

    def _check_header(self, g, header):
        c = self.checkpoint
        if header[0] != VERSION:
            raise UnknownVersion(f"{self.path}: format version {header[0]}; this program knows version {VERSION}")
        save_id = f"{header[9]:016x}{header[10]:016x}"
        self._require(save_id == c.save_id, f"belongs to save {save_id}, but the index to {c.save_id}")
        self._require(header[2] == g, f"was written as shard {header[2]}, not {g}")
        expected = [VERSION, c.world_size, g, len(c.file_ranks), len(self.ranks), c.step % 2**64, c.block_bytes,
                    c.segment_align, c.split, *header[9:11], 0]
        self._require(header == expected, f"/header is {header}, but by the index it is {expected}")

    def _parts(self, i, header, ranks, data):
        """§7: what /check of the i-th rank covers. Numbers that are wrong give wrong parts, and so a wrong CRC."""
        row = ranks[i]
        yield from (header, np.array(row, np.uint64))
        for code in sorted(self.blocks, key=lambda code: DTYPES[code][0]):
            start, _, length = row[9 + 3 * (code - 1):][:3]
            yield self.blocks[code][start // self.checkpoint.block_bytes:][:length // self.checkpoint.block_bytes]
        for path, (_, column) in SHARD_FILE.items():
            if column in (1, 5):
                yield data[path][row[column]:][:row[column + 1] + path.endswith("_ptr")]
            else:
                yield data[path][row[column]:ranks[i + 1][column] if i + 1 < len(ranks) else None]

    def _compare(self, ranks, data):
        """/ranks and /table, and /segments of the index, must be what §3, §4 and §5 give; /rank_local must be sound."""
        names, keys = octets(data, "/table/name"), octets(data, "/rank_local/name")
        values = rows(data["/rank_local/value_ptr"], data["/rank_local/value_bytes"])
        boxes = rows(data["/table/shape_ptr"], *(data[f"/table/{c}"].tolist() for c in ("shape", "offset", "extent")))
        numbers = (data[f"/table/{c}"].tolist() for c in ("dtype", "arena_start", "bytes", "digest"))
        table = list(zip(names, boxes, *numbers, strict=True))
        self.digests, self.rank_local, line, local = {}, {}, 0, 0
        for rank, row in zip(self.ranks, ranks):
            pieces, segments = self.checkpoint.pieces[rank]
            segments = [segments[code] if code in self.blocks else (0, segments[code][1], 0) for code in DTYPES]
            expected = [rank, line, len(pieces), data["/table/name_ptr"][line], data["/table/shape_ptr"][line],
                        local, row[6], data["/rank_local/name_ptr"][local], data["/rank_local/value_ptr"][local],
                        *sum(segments, ())]
            self._require(row == expected and self.checkpoint.segments[rank] == [[s[0], s[2]] for s in segments],
                          f"/ranks, or /segments of the index, is not what the index means for rank {rank}")
            for piece, (name, box, *place, digest) in zip(pieces, table[line:line + len(pieces)], strict=True):
                t = piece.tensor
                self._require(text(name) == t.name and box == (list(t.shape), list(piece.offset), list(piece.extent))
                              and place == [t.code, piece.start, piece.bytes],
                              f"tensor {t.name}: /table has another piece of rank {rank} than follows from the index")
                self.digests[t.name, rank] = digest
            own = slice(local, local + row[6])
            self._require(keys[own] == sorted(set(keys[own])), f"/rank_local of rank {rank} is not in order of names")
            self.rank_local[rank] = {text(k): v.tobytes() for k, (v,) in zip(keys[own], values[own], strict=True)}
            line, local = line + len(pieces), local + row[6]
        self._require((line, local) == (len(table), len(keys)) and len(values) == len(keys),
                      "/table or /rank_local has rows of no rank")
        for code, (start, _, length) in self.checkpoint.pieces[self.ranks[-1]][1].items():
            self._require(len(self.blocks.get(code, ())) == (start + length) // self.checkpoint.block_bytes,
                          f"/blocks/{DTYPES[code][0]} has another length than follows from the index")

    def read(self, code, start, length, what):
        """Bytes [start, start + length) of an arena, from blocks whose CRCs match. what: for the message."""
        size = self.checkpoint.block_bytes
        first, last = start // size, -(-(start + length) // size)
        data = np.fromfile(self.path, np.uint8, (last - first) * size, offset=self.offsets[code] + first * size)
        batch = max(1, (1 << 20) // size)  # blocks that stay in the cache
        for i in range(first, last, batch):
            crcs = crc64(data[(i - first) * size:(min(i + batch, last) - first) * size].reshape(-1, size))
            for bad in np.flatnonzero(crcs != self.blocks[code][i:min(i + batch, last)]):
                raise InvalidCheckpoint(
                    f"{self.path}: {what}: block {i + bad} of /data/{DTYPES[code][0]} does not match its CRC")
        return data[start - first * size:][:length]

    def verify(self, digests):
        """Checks all bytes, and adds the contributions of the pieces to the digests of the tensors."""
        check_superblock(self.path)
        for rank in self.ranks:
            pieces, segments = self.checkpoint.pieces[rank]
            for code in self.blocks:
                start, _, length = segments[code]
                data = self.read(code, start, length, f"rank {rank}")
                for piece in (piece for piece in pieces if piece.tensor.code == code):
                    t, own = piece.tensor, data[piece.start - start:][:piece.bytes]
                    digest = contribution(own, t.shape, piece.offset, piece.extent, t.itemsize)
                    self._require(digest == self.digests[t.name, rank],
                                  f"tensor {t.name}: the piece of rank {rank} does not match its digest")
                    digests[t.name] ^= digest
                    own[:] = 0
                self._require(not data.any(), f"rank {rank}: the pads of /data/{DTYPES[code][0]} are not zero")


def main():
    parser = argparse.ArgumentParser(
        description="Lists, verifies and reads an fsdp2 checkpoint without fsdp2 (the format is in FORMAT.md).",
        epilog="Exit status: 0 done, valid; 1 the checkpoint is invalid; 2 no checkpoint, unreadable, or wrong usage.")
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint; alone: list its tensors")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="check every byte of every file, print one line")
    action.add_argument("--digests", action="store_true", help="print the content digest of each tensor: 'name digest'")
    action.add_argument("--tensor", metavar="NAME", help="print a tensor (bf16 and float8 as float32), or see --out")
    parser.add_argument("--out", metavar="FILE.npy", help="write the tensor as .npy instead (bf16, float8 as raw bits)")
    options = parser.parse_args()
    if options.out and options.tensor is None:
        parser.error("--out needs --tensor")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="surrogateescape")
    try:
        checkpoint = Checkpoint(options.checkpoint)
        tensors = checkpoint.tensors.values()
        if options.verify:
            checkpoint.verify()
            print(f"{options.checkpoint}: valid: step {checkpoint.step}, {len(tensors)} tensors, "
                  f"{len(checkpoint.file_ranks)} files, save {checkpoint.save_id}")
        elif options.tensor is not None:
            array = checkpoint.read(options.tensor)
            dtype = checkpoint.tensors[options.tensor].dtype
            if options.out:
                with open(options.out, "wb") as file:
                    np.save(file, array)
            else:
                print(to_float32(array, dtype) if dtype in ("bf16", "f8_e4m3", "f8_e5m2") else array)
        elif options.digests:
            for tensor in tensors:
                print(tensor.name, f"{tensor.digest:016x}")
        else:
            table = [(t.name, t.dtype, str(list(t.shape)), t.placements, f"{t.digest:016x}") for t in tensors]
            widths = [max(map(len, column)) for column in zip(*table)]
            for row in table:
                print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    except (CheckpointError, OSError) as error:
        print(f"read_checkpoint.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, InvalidCheckpoint) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
