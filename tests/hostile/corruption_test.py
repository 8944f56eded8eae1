# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Damages checkpoints at random, thousands of times, and loads them: each must give its content or a CheckpointError
that names the file. Usage: corruption_test.py <hostile_reader> [--seed N] [--trials N] [--first N]

A trial depends on the seed and its own number alone: --first N --trials 1 repeats it. With FSDP2_TEST_LONG, 10,000.
"""

import argparse
import collections
import os
import random
import sys
import tempfile
import time
import unittest
from pathlib import Path

import h5py

import hostile

PAGE = 4096


def files(checkpoint):
    return sorted(path.name for path in checkpoint.iterdir())


def shards(checkpoint):
    return [name for name in files(checkpoint) if name.startswith("shard")]


class Samples:
    """A checkpoint, another step of the same save's model, and what is where in its files."""

    def __init__(self, reader, folder):
        self.checkpoint, self.other = folder / "step-1", folder / "step-2"
        self.digest = reader.make(self.checkpoint, 1)
        self.other_digest = reader.make(self.other, 2)
        self.ranges, self.outside = {}, {}
        for name in files(self.checkpoint):
            ranges = []

            def add(_, item):
                if isinstance(item, h5py.Dataset) and item.id.get_offset() is not None:
                    ranges.append((item.id.get_offset(), item.id.get_offset() + item.id.get_storage_size()))

            with h5py.File(self.checkpoint / name, "r") as file:
                file.visititems(add)
            ranges.sort()
            inside = set()
            for begin, end in ranges:
                inside.update(range(begin, end))
            self.ranges[name] = ranges
            self.outside[name] = [at for at in range((self.checkpoint / name).stat().st_size) if at not in inside]


# Each damage changes the checkpoint at `path`, and returns the names of the files of which the error must name one, and
# whether it must be refused.


def flip(path, names, position_of, rng):
    name = rng.choice(names)
    data = bytearray((path / name).read_bytes())
    for position in {position_of(name, data) for _ in range(rng.randint(1, 4))}:  # a bit flipped twice is as it was
        data[position // 8] ^= 1 << position % 8
    hostile.replace(path / name, data)
    return [name]


def flip_anywhere(path, samples, rng):
    return flip(path, files(path), lambda _, data: rng.randrange(8 * len(data)), rng), False


def flip_hdf5s_own_bytes(path, samples, rng):
    return flip(path, files(path), lambda name, _: 8 * rng.choice(samples.outside[name]) + rng.randrange(8), rng), False


def flip_datasets(path, samples, rng):
    """Small ones as often as big ones. All are under a digest."""

    def position(name, _):
        begin, end = rng.choice(samples.ranges[name])
        return rng.randrange(8 * begin, 8 * end)

    return flip(path, files(path), position, rng), True


def truncate(path, samples, rng):
    name = rng.choice(files(path))
    data = (path / name).read_bytes()
    keep = rng.choice([0, 1, 47, 48, 4096, len(data) - 1, rng.randrange(len(data))])
    hostile.replace(path / name, data[:keep])
    return [name], True


def extend(path, samples, rng):
    name = rng.choice(files(path))
    more = rng.choice([1, PAGE, rng.randrange(1, 3 * PAGE)])
    tail = bytes(more) if rng.random() < 0.5 else rng.randbytes(more)
    hostile.replace(path / name, (path / name).read_bytes() + tail)
    return [name], True


def swap(path, samples, rng):
    a, b = rng.sample(shards(path), 2)
    (path / a).rename(path / "away")
    (path / b).rename(path / a)
    (path / "away").rename(path / b)
    return [a, b], True


def file_of_another_step(path, samples, rng):
    names = rng.sample(files(path), rng.randint(1, len(files(path)) - 1))
    for name in names:
        hostile.replace(path / name, (samples.other / name).read_bytes())
    return files(path), True


def remove_file(path, samples, rng):
    name = rng.choice(files(path))
    (path / name).unlink()
    return [name], True


def remove_dataset(path, samples, rng):
    """By HDF5, so that its checksums are right."""
    name = rng.choice(files(path))
    data = (path / name).read_bytes()
    hostile.replace(path / name, data)
    with h5py.File(path / name, "r+", libver=("v110", "v110"), track_order=False) as file:
        found = []
        file.visititems(lambda key, item: found.append(key) if isinstance(item, h5py.Dataset) else None)
        del file[rng.choice([key for key in found if not key.startswith("tensors/")])]
    return [name], True


def blank_pages(path, samples, rng):
    """What a file system leaves of a file that was not synchronised."""
    name = rng.choice(files(path))
    data = bytearray((path / name).read_bytes())
    first = rng.randrange(0, len(data), PAGE)
    count = min(PAGE * rng.randint(1, 3), len(data) - first)
    data[first:first + count] = bytes(count)
    hostile.replace(path / name, data)
    return [name], False


def stale_page(path, samples, rng):
    """A page of another step: torn writes. It can be all that the index says."""
    name = rng.choice(files(path))
    data, other = bytearray((path / name).read_bytes()), (samples.other / name).read_bytes()
    first = rng.randrange(0, len(data), PAGE)
    data[first:first + PAGE] = other[first:first + PAGE]
    hostile.replace(path / name, data)
    return files(path), False


def moved_page(path, samples, rng):
    name = rng.choice(files(path))
    data = bytearray((path / name).read_bytes())
    a, b = (rng.randrange(0, len(data) - PAGE, PAGE) for _ in range(2))
    data[a:a + PAGE], data[b:b + PAGE] = data[b:b + PAGE], data[a:a + PAGE]
    hostile.replace(path / name, data)
    return [name], False


def noise(path, samples, rng):
    name = rng.choice(files(path))
    data = bytearray((path / name).read_bytes())
    count = rng.randint(1, 200)
    first = rng.randrange(0, len(data) - count)
    data[first:first + count] = rng.randbytes(count)
    hostile.replace(path / name, data)
    return [name], False


def no_regular_file(path, samples, rng):
    """Nobody ever writes to the pipe: a reader that waits for it hangs."""
    name = rng.choice(files(path))
    (path / name).unlink()
    rng.choice([os.mkfifo, os.mkdir, lambda at: os.symlink(at.name, at), lambda at: os.symlink("nothing", at),
                lambda at: os.symlink("/dev/zero", at)])(path / name)
    return [name], True


DAMAGES = {
    flip_anywhere: 6, flip_hdf5s_own_bytes: 4, flip_datasets: 4, truncate: 2, extend: 1, swap: 1, file_of_another_step: 1,
    remove_file: 1, remove_dataset: 1, blank_pages: 2, stale_page: 2, moved_page: 1, noise: 2, no_regular_file: 1}


class Corruption(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.reader = hostile.Reader(OPTIONS.reader)
        cls.addClassCleanup(cls.reader.__exit__)
        cls.samples = Samples(cls.reader, cls.folder)

    def test_sound_checkpoints_are_loaded(self):
        for path, digest in ((self.samples.checkpoint, self.samples.digest), (self.samples.other, self.samples.other_digest)):
            result = self.reader.read(path)
            self.assertEqual((result["status"], result.get("digest"), result["verify"]), (0, digest, "valid"), result)
        self.assertNotEqual(self.samples.digest, self.samples.other_digest)

    def test_no_damage_gets_through(self):
        seen = collections.Counter()
        slowest, faults = 0, []
        started = time.monotonic()
        for number in range(OPTIONS.first, OPTIONS.first + OPTIONS.trials):
            rng = random.Random(f"{OPTIONS.seed} {number}")
            damage = rng.choices(list(DAMAGES), list(DAMAGES.values()))[0]
            path = hostile.copy(self.samples.checkpoint, self.folder / f"trial-{number}")
            names, is_certain = damage(path, self.samples, rng)
            result = self.reader.read(path)
            fault = hostile.fault_of(result, self.samples.digest, names)
            if fault is None and is_certain and result["status"] == hostile.LOADED:
                fault = "accepted"
            if fault is not None:
                faults.append(f"trial {number} of seed {OPTIONS.seed}, {damage.__name__} of {names}: {fault}: {result}")
            seen[damage.__name__, "refused" if result["status"] == hostile.REFUSED else "loaded"] += 1
            slowest = max(slowest, result.get("seconds", 10))
            for entry in path.iterdir():
                hostile.remove(entry)
            path.rmdir()
        refused = sum(count for (_, outcome), count in seen.items() if outcome == "refused")
        print(f"{OPTIONS.trials} trials in {time.monotonic() - started:.1f} s: {refused} refused, the slowest in "
              f"{slowest:.3f} s")
        if OPTIONS.trials > 1:
            for damage in DAMAGES:
                print(f"  {damage.__name__}: {seen[damage.__name__, 'refused']} refused, "
                      f"{seen[damage.__name__, 'loaded']} loaded")
        self.assertEqual(faults, [], "\n".join(faults[:10]) + self.reader.complaints()[-4000:])
        self.assertEqual(self.reader.complaints(), "")
        if OPTIONS.trials >= 300:  # else the damage does not reach what is read
            self.assertGreater(refused, OPTIONS.trials / 2)
            self.assertGreater(OPTIONS.trials - refused, OPTIONS.trials / 20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=10000 if os.environ.get("FSDP2_TEST_LONG") else 400)
    parser.add_argument("--first", type=int, default=0)
    OPTIONS = parser.parse_args()
    unittest.main(argv=sys.argv[:1])
