# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Runs the example 01_train_lm. Usage: train_lm_test.py <01_train_lm> <mpirun> [its flags …] <its flag for ranks>"""

import math
import os
import sys
import unittest

from example_test import ExampleTest

SMALL = ["--width", "32", "--context", "4", "--window", "8"]


class TrainLm(ExampleTest):
    def test_losses_fall_and_do_not_depend_on_the_number_of_ranks(self):
        one = self.losses(1, "--steps", "30")
        self.assertEqual([step for step, _ in one], list(range(1, 31)))
        self.assertAlmostEqual(one[0][1], math.log(256), delta=0.1)
        self.assertLess(one[-1][1], 3)
        self.assert_close(self.losses(2, "--steps", "30"), one)
        self.assert_close(self.losses(3, "--steps", "30"), one)

    def test_a_rank_may_be_left_without_samples(self):
        flags = [*SMALL, "--steps", "5", "--batch", "2"]
        self.assert_close(self.losses(3, *flags), self.losses(1, *flags))

    def test_a_resumed_run_goes_on_as_if_it_had_not_been_interrupted(self):
        whole = self.losses(2, *SMALL, "--steps", "12", "--save-every", "5", "--save-dir", self.path("run"))
        self.assertEqual(sorted(os.listdir(self.path("run"))), ["step-00000005", "step-00000010"])
        resume = ["--resume", self.path("run/step-00000005")]
        self.assertEqual(self.losses(2, *SMALL, "--steps", "12", *resume), whole[5:])
        self.assert_close(self.losses(3, *SMALL, "--steps", "12", *resume), whole[5:])

    def test_other_hyperparameters_are_not_resumed(self):
        self.losses(1, *SMALL, "--steps", "1", "--save-every", "1", "--save-dir", self.path("run"))
        resume = ["--resume", self.path("run/step-00000001")]
        self.assert_refused(1, "was trained with --width 32", "--context", "4", *resume)
        self.assert_refused(1, "was trained with --layers 2", *SMALL, "--layers", "3", *resume)

    def test_an_existing_checkpoint_is_not_overwritten(self):
        flags = [*SMALL, "--steps", "1", "--save-every", "1", "--save-dir", self.path("run")]
        self.losses(1, *flags)
        self.assert_refused(1, "already exists", *flags)

    def test_what_cannot_be_read_or_written(self):
        missing = self.path("missing")
        self.assert_refused(1, missing, "--text", missing)
        self.assert_refused(1, self.folder.name, "--text", self.folder.name)
        self.assert_refused(1, missing, "--csv", os.path.join(missing, "losses.csv"))
        self.assert_refused(1, missing, "--resume", missing)

    def test_bad_usage(self):
        self.assert_refused(2, "--bogus", "--bogus")
        self.assert_refused(2, "--layers", "--layers", "1")
        self.assert_refused(2, "--steps", "--steps", "many")
        self.assert_refused(2, "--batch", "--batch", "0")
        self.assert_refused(2, "--lr", "--lr", "nan")
        self.assert_refused(2, "--save-every requires --save-dir", "--save-every", "3")

    def test_help(self):
        result = self.run_on(2, "--help")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout.count("Usage:"), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
