# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Runs the terminal session of docs/guide.md and compares what it prints.

Usage: session_test.py <directory with programs>… -- <mpirun and its flags, without the number of ranks>
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

GUIDE = Path(__file__).resolve().parent.parent.parent / "docs" / "guide.md"


def session():
    """Command → the lines that it should print. A line that is "…" stands for any number of lines."""
    [block] = re.findall(r"^```console\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    commands = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def matches(lines, text):
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".+") + r"\n" for line in lines)
    return re.fullmatch(pattern, text) is not None


def main():
    split = sys.argv.index("--")
    programs, launcher = sys.argv[1:split], sys.argv[split + 1:]
    environment = {**os.environ, "PATH": os.pathsep.join([*programs, os.environ["PATH"]])}
    commands = session()
    assert len(commands) > 5, "the guide has no session"
    with tempfile.TemporaryDirectory() as folder:
        for command, expected in commands:
            words = command.split()
            if words[:2] == ["mpirun", "-n"]:
                words = [*launcher, *words[2:]]
            result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
            assert result.returncode == 0 and matches(expected, result.stdout), (
                f"$ {command}\nended with {result.returncode} and printed\n{result.stdout}{result.stderr}")
    print(f"{len(commands)} commands did what the guide says")


if __name__ == "__main__":
    main()
