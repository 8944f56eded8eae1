# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of hostile checkpoints share: hostile_reader as a process that is asked many times."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

LOADED, REFUSED = 0, 3


class Reader:
    """hostile_reader, told one directory after the other."""

    def __init__(self, program):
        self.program = program
        self.stderr = tempfile.TemporaryFile(mode="w+b")
        self.process = subprocess.Popen([program, "read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.stderr, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()

    def make(self, directory, seed):
        """Writes a checkpoint; returns the digest of its content, which comes from the values and not from reading."""
        result = subprocess.run([self.program, "make", directory, str(seed)], check=True, stdout=subprocess.PIPE,
                                text=True, timeout=60)
        return result.stdout.strip()

    def read(self, directory):
        """What became of loading a checkpoint: see hostile_reader.cpp."""
        print(directory, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"hostile_reader itself ended: {self.complaints()}")
        return json.loads(line)

    def complaints(self):
        """What it wrote to standard error, such as a sanitizer's report."""
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")


def copy(source, target):
    """A checkpoint of which any file can be replaced, and none changed in place: files are hard links."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).hardlink_to(file)
    return target


def replace(path, data):
    path.unlink()
    path.write_bytes(data)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fault_of(result, digest, names):
    """Why an outcome is not allowed, or None: the content is that of the digest, or a typed error names a file of
    `names`; loading and verifying agree."""
    status, verdict = result["status"], result.get("verify", "")
    if result["signal"] == 14:
        return "hangs"
    if result["signal"] != 0:
        return f"killed by signal {result['signal']}"
    if status == LOADED:
        return None if result["digest"] == digest else "wrong content was accepted"
    if status != REFUSED:
        return f"status {status}"
    if not any(name in result["error"] for name in names):
        return "the error does not name the file"
    if verdict == "valid":
        return "cannot be loaded, but is valid"
    if not any(name in verdict for name in names):
        return "the verifier does not name the file"
    return None
