// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#pragma once

// What the preloaded shim offers to the program that it is preloaded into. FSDP2_FAULT_ROOT holds the path prefixes,
// separated by ':', of the files that it acts on; with FSDP2_FAULT_OLD=1 these lie on a file system that has neither
// fallocate nor flags of renameat2.

extern "C" {

/// Forgets the calls so far and arms faults "<call>:<n>:<effect>", separated by ','; "" arms none. <call> is a system
/// call's name, "scratch-" before it for files in memory, or "any"; <n> counts from 1. <effect> is an errno's
/// name; "short", a write or read of half the bytes; "kill", SIGKILL of this process, half-way into a write; "killall",
/// of `pids` too.
void fsdp2_fault_arm(const char* faults, const int* pids, int pid_count);
/// The calls that faults hit since then, one a line: name, paths.
const char* fsdp2_fault_fired();
/// All calls since then, one a line.
const char* fsdp2_fault_calls();

}  // extern "C"
