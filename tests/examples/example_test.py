# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of examples share: a folder of their own, and the example on some ranks."""

import os
import subprocess
import sys
import tempfile
import unittest


class ExampleTest(unittest.TestCase):
    """Arguments of the test: <the example> <mpirun> [its flags …] <its flag for ranks>."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def run_on(self, ranks, *flags, timeout=120):
        program, *mpirun = sys.argv[1:]
        return subprocess.run([*mpirun, str(ranks), program, *flags], capture_output=True, text=True, timeout=timeout)

    def losses(self, ranks, *flags, timeout=120):
        """The lines of the loss curve: (step, loss)."""
        csv = self.path("losses.csv")
        result = self.run_on(ranks, "--csv", csv, *flags, timeout=timeout)
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(csv) as file:
            header, *lines = file.read().splitlines()
        self.assertEqual(header, "step,loss")
        return [(int(step), float(loss)) for step, loss in (line.split(",") for line in lines)]

    def assert_close(self, found, expected):
        self.assertEqual([step for step, _ in found], [step for step, _ in expected])
        for (step, a), (_, b) in zip(found, expected):
            # AdamW hides the scale of gradients, all but its eps: a wrong one moves losses by 3e-6, rounding by 1e-7.
            self.assertLess(abs(a - b), 1e-6 * b, f"step {step}")

    def assert_refused(self, status, message, *flags):
        result = self.run_on(2, *flags)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertEqual(result.stderr.count(message), 1, result.stderr)
