# SPDX-FileCopyrightText: 2026 The fsdp2 authors
# SPDX-License-Identifier: BSD-3-Clause
"""Saves while system calls fail, ranks are killed, and others write to the same name.

Usage: fault_test.py errors|kills|writers <shim> <program> <fsdp2-ckpt> <mpirun> [<its options>...]

Samples by a seed, FSDP2_FAULT_SEED or a fixed one; with FSDP2_TEST_LONG in the environment injects every error, and kills and races a thousand times.
"""

import collections
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PART, SHIM, PROGRAM, TOOL, *MPIRUN = sys.argv[1:]
IS_LONG = bool(os.environ.get("FSDP2_TEST_LONG"))
SEED = int(os.environ.get("FSDP2_FAULT_SEED", "1"))
LIMIT = 30  # seconds that any call, and the end of a job that lost a rank, may take
random_source = random.Random(f"{PART} {SEED}")
counts = collections.Counter()
longest = collections.Counter()  # seconds, by what


class Failure(Exception):
    pass


def require(condition, *what):
    if not condition:
        raise Failure(" ".join(map(str, what)))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Session:
    """The program, on some ranks or (0) alone without MPI, that does one command after another."""

    def __init__(self, ranks, root=None, is_old=False):
        environment = dict(os.environ)
        settings = {}
        if root:
            # And the file in memory that a save makes: HDF5 opens it by a name in /proc.
            settings = {"LD_PRELOAD": SHIM, "FSDP2_FAULT_ROOT": f"{root}:/memfd:fsdp2-:/proc/self/fd/",
                        "FSDP2_FAULT_OLD": str(int(is_old))}
        command = [PROGRAM, "mpi" if ranks else "single"]
        if ranks:
            # `env` hands the settings to the ranks under every mpirun, and not to mpirun itself.
            command = [*MPIRUN, str(ranks), "env", *(f"{key}={value}" for key, value in settings.items()), *command]
        else:
            environment.update(settings)
        # A file, not a pipe: nobody reads it unless something fails.
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, bufsize=0)
        self.rest = b""
        start = time.monotonic()
        self.pids = self.answer()["pids"]
        longest["until a job had started"] = max(longest["until a job had started"], time.monotonic() - start)

    def line(self):
        """The next line of the program, None at the end. An mpirun may have its own to say about a killed rank."""
        deadline = time.monotonic() + LIMIT
        while True:
            while b"\n" not in self.rest:
                ready, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
                require(ready, f"no answer within {LIMIT} s")
                octets = os.read(self.process.stdout.fileno(), 1 << 20)
                if not octets:
                    return None
                self.rest += octets
            line, self.rest = self.rest.split(b"\n", 1)
            if line.startswith(b"{"):
                return line

    def stderr(self):
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-3000:]

    def answer(self):
        line = self.line()
        if line is None:
            raise Failure("the program ended: " + self.stderr())
        return json.loads(line)

    def send(self, do, target, **values):
        self.process.stdin.write((json.dumps({"do": do, "target": str(target), **values}) + "\n").encode())

    def ask(self, do, target, **values):
        self.send(do, target, **values)
        return self.answer()

    def save(self, target, version, ranks_per_file=1, overwrite=False, rank=-1, faults="", **values):
        return self.ask("save", target, version=version, ranks_per_file=ranks_per_file, overwrite=overwrite, rank=rank,
                        faults=faults, **values)["ranks"]

    def end(self):
        self.process.stdin.close()
        status = self.process.wait(LIMIT)
        require(status == 0, "the program ended with", status, self.stderr())

    def wait_gone(self, start):
        """That a job that lost a rank at `start` is gone, all of it, in time."""
        deadline = start + LIMIT
        try:
            self.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failure(f"mpirun is still there after {LIMIT} s") from None
        while any(is_running(pid) for pid in self.pids):
            require(time.monotonic() < deadline, f"ranks are still there after {LIMIT} s")
            time.sleep(0.01)
        longest["until a job was gone"] = max(longest["until a job was gone"], time.monotonic() - start)

    def stop(self):
        """Whatever state it is in."""
        for pid in self.pids if self.process.poll() is None else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.kill()
        self.process.wait()


class Setting:
    """A root with the checkpoint "base", of version 0, that nothing touches, and a program that looks."""

    def __init__(self, folder):
        self.root = Path(folder)
        self.looker = Session(0)
        self.must_succeed(self.looker.save(self.root / "base", 0))
        self.version = 0

    def new_version(self):
        self.version += 1
        return self.version

    @staticmethod
    def must_succeed(ranks):
        require(all(rank["error"] == "" for rank in ranks), "failed without a fault:", ranks)

    def found(self, name):
        """The version of a checkpoint, of which every bit was looked at; None where there is none."""
        if not (self.root / name).is_symlink() and not (self.root / name).exists():
            return None
        answer = self.looker.ask("check", self.root / name)
        require("version" in answer, f"{name} is damaged:", answer, sorted(os.listdir(self.root / name)))
        return answer["version"]

    def names(self):
        return sorted(name for name in os.listdir(self.root) if not name.startswith("."))

    def hidden(self):
        return sorted(name for name in os.listdir(self.root) if name.startswith("."))

    def remove(self, name):
        shutil.rmtree(self.root / name, ignore_errors=True)


def tool_accepts(checkpoint):
    result = subprocess.run([TOOL, "verify", checkpoint], capture_output=True, text=True, timeout=LIMIT)
    require(result.returncode == 0, "fsdp2-ckpt verify:", result.stdout, result.stderr)


# --- errors: the n-th call fails ---

EFFECTS = {
    "open": ["EIO", "ENOSPC", "EMFILE", "ENOLCK", "EINTR"],
    "pwrite": ["EIO", "ENOSPC", "EINTR", "short"],
    "fallocate": ["EIO", "ENOSPC", "EINTR", "EOPNOTSUPP"],
    "pread": ["EIO", "EINTR", "short"],
    "preadv": ["EIO", "EINTR", "short"],
    # A file in memory: nothing but opening it fails.
    "scratch-open": ["EMFILE"],
    "scratch-pwrite": ["short"],
    "scratch-pread": ["short"],
    "scratch-ftruncate": [],
    "scratch-close": [],
}
OTHER_EFFECTS = ["EIO", "ENOSPC", "ENOLCK", "EINTR"]


def expectation(call, number, paths, effect):
    """Whether a save or load with this fault succeeds: from what calls mean, not from the code."""
    if ".trash-" in paths:
        return True  # the new checkpoint is in place: that the old one is not yet gone is no failure
    if call == "openat":
        # The first look is for a replacement to be restored, if there is one. The second, where directories cannot be
        # exchanged, is for what must never be restored.
        return number == 1
    if effect == "short" or (call, effect) in {("fallocate", "EOPNOTSUPP"), ("renameat2", "EINVAL")}:
        return True
    if effect == "EINTR":
        # After an interrupted fsync or rename nobody knows what has happened.
        return call not in ("fsync", "rename", "renameat2")
    return False


def faults_of(ranks):
    """All faults, as (rank, call, n, effect, paths), that the calls of a run without faults allow."""
    faults = []
    for rank, run in enumerate(ranks):
        seen = collections.Counter()
        for line in run["calls"].splitlines():
            call, paths = line.split(" ", 1)
            seen[call] += 1
            for effect in EFFECTS.get(call, OTHER_EFFECTS):
                faults.append((rank, call, seen[call], effect, paths))
    return faults


def sample(faults, count):
    """Some of each call and effect, then any."""
    if IS_LONG or count >= len(faults):
        return faults
    shuffled = random_source.sample(faults, len(faults))
    first = {}
    for fault in shuffled:
        first.setdefault((fault[1], fault[3]), fault)
    # What happens once or twice in a save is where its order matters.
    rare = [fault for fault in shuffled if fault[1] in ("renameat2", "rename", "unlink", "fsync")]
    return list(dict.fromkeys([*first.values(), *rare[:count], *shuffled[:count]]))


def check_outcome(ranks, fault, case):
    """The same on every rank, in time, as expected, and without leaks. Returns whether it succeeded."""
    rank, call, number, effect, paths = fault
    fired = ranks[rank]["fired"]
    require(fired.startswith(call + " "), case, "the fault did not fire", ranks)
    counts[f"{call}:{effect}"] += 1
    errors = {run["error"] for run in ranks}
    require(len(errors) == 1, case, "ranks report different errors:", errors)
    error = errors.pop()
    expected = expectation(call, number, fired, effect)
    require(expected == (error == ""), case, fired, "expected",
            "success" if expected else "an error", "found:", error or "success")
    require(re.match(rf"$|IoError: rank {rank}: ", error), case, "another type, or another rank:", error)
    require(max(run["seconds"] for run in ranks) < LIMIT, case, "took too long:", ranks)
    return error == ""


def inject_into_saves(setting, ranks, ranks_per_file, overwrite, is_old, count):
    session = Session(ranks, setting.root, is_old)
    target = setting.root / "step"
    options = {"ranks_per_file": ranks_per_file, "overwrite": overwrite}
    try:
        setting.must_succeed(session.save(target, setting.new_version(), **options))
        if not overwrite:
            setting.remove("step")
        clean = session.save(target, setting.new_version(), **options, wants_calls=True)
        setting.must_succeed(clean)
        descriptors = [run["descriptors"] for run in clean]
        before = setting.version if overwrite else None
        if not overwrite:
            setting.remove("step")
        for fault in sample(faults_of(clean), count):
            rank, call, number, effect, _ = fault
            version = setting.new_version()
            faults = f"{call}:{number}:{effect}"
            case = f"save {options} on {ranks} ranks, old={is_old}, rank {rank} {faults}:"
            outcome = session.save(target, version, **options, rank=rank, faults=faults)
            succeeded = check_outcome(outcome, fault, case)
            found = setting.found("step")
            require(found == (version if succeeded else before), case, "found version", found, "before:", before,
                    "new:", version, "error:", outcome[0]["error"])
            if overwrite:
                before = found
            else:
                setting.remove("step")
            require(setting.found("base") == 0, case, "base")
            leftovers = setting.hidden()
            require(not leftovers or ".trash-" in outcome[rank]["fired"], case, "leftovers:", leftovers)
            for name in leftovers:
                setting.remove(name)
            require([run["descriptors"] for run in outcome] == descriptors, case, "descriptors are leaked")
        # A failed removal of what a failed save has written changes nothing for the next one.
        failed = session.save(target, setting.new_version(), **options, rank=0, faults="fsync:1:EIO,unlinkat:1:EIO")
        require(all("IoError: rank 0: fsync" in run["error"] for run in failed), failed)
        require(failed[0]["fired"].count("\n") == 2, "the removal did not fail", failed)
        require(setting.found("step") == before, "a failed save changed its target")
        require(setting.hidden(), "the removal left nothing")
        counts["removal of a failed save"] += 1
        setting.must_succeed(session.save(target, setting.new_version(), **options))
        require(setting.found("step") == setting.version, "the next save")
        for name in setting.hidden():
            setting.remove(name)
        setting.remove("step")
        session.end()
    finally:
        session.stop()


def inject_into_loads(setting, ranks, count):
    session = Session(ranks, setting.root)
    try:
        clean = session.ask("load", setting.root / "base", rank=-1, faults="", wants_calls=True)["ranks"]
        setting.must_succeed(clean)
        for fault in sample(faults_of(clean), count):
            rank, call, number, effect, _ = fault
            faults = f"{call}:{number}:{effect}"
            case = f"load on {ranks} ranks, rank {rank} {faults}:"
            outcome = session.ask("load", setting.root / "base", rank=rank, faults=faults)["ranks"]
            check_outcome(outcome, fault, case)
            require([run["descriptors"] for run in outcome] == [run["descriptors"] for run in clean], case,
                    "descriptors are leaked")
        session.end()
    finally:
        session.stop()


def test_errors(setting):
    for ranks, ranks_per_file, overwrite, is_old in ((3, 1, False, False), (2, 2, True, False), (2, 2, False, True),
                                                     (2, 1, True, True)):
        inject_into_saves(setting, ranks, ranks_per_file, overwrite, is_old, 12)
    inject_into_loads(setting, 2, 30)
    tool_accepts(setting.root / "base")
    wanted = {f"{call}:{effect}" for call in ("open", "pwrite", "fsync", "close", "fallocate", "ftruncate", "mkdir",
                                              "rename", "renameat2", "unlink", "unlinkat", "pread", "preadv")
              for effect in EFFECTS.get(call, OTHER_EFFECTS)}
    require(wanted <= set(counts), "never fired:", sorted(wanted - set(counts)))
    return sum(counts.values())


# --- kills: a rank, or all, are gone at once ---

# ranks per file, overwrite, old file system
SCENARIOS = [(1, False, False), (3, False, False), (1, True, False), (3, True, True)]
RANKS = 3
# Where the order of calls decides what is left.
PUBLICATION = ("unlink", "unlinkat", "renameat2", "rename", "fsync", "openat")


def kill_once(setting, calls, scenario, kind):
    """One job that saves until it is killed; what it leaves."""
    ranks_per_file, overwrite, is_old = scenario
    options = {"ranks_per_file": ranks_per_file, "overwrite": overwrite}
    setting.remove("first")
    setting.remove("step")
    for name in setting.hidden():
        if name.startswith(".step.old-"):
            setting.remove(name)  # else it may come back
    leftovers_before = set(setting.hidden())
    case = f"{scenario} {kind}"
    before = setting.new_version() if overwrite else None
    session = Session(RANKS, setting.root, is_old)
    try:
        acknowledged = setting.new_version()
        setting.must_succeed(session.save(setting.root / "first", acknowledged, ranks_per_file))
        if overwrite:
            setting.must_succeed(session.save(setting.root / "step", before, ranks_per_file))
        new = setting.new_version()
        rank = random_source.randrange(RANKS)
        victim = random_source.choice(["kill", "killall"])
        case += f" {victim} "
        if kind == "time":
            # Saves that follow one another, so that the moment is in one of them.
            victims = session.pids if victim == "killall" else [session.pids[rank]]
            end = time.monotonic() + random_source.uniform(0, 0.1)
            while True:
                session.send("save", setting.root / "step", version=new, **options, rank=-1, faults="")
                left = end - time.monotonic()
                ready, _, _ = select.select([session.process.stdout], [], [], max(0, left))
                if not ready:
                    break
                setting.must_succeed(session.answer()["ranks"])
                before = new
                if not overwrite:
                    setting.remove("step")
                    before = None
                new = setting.new_version()
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            case += f"rank {rank}"
        else:
            if kind == "publication":
                rank = 0
                places = [n for n, call in enumerate(calls[0], 1) if call in PUBLICATION]
                number = random_source.choice(places)
            else:
                number = random_source.randrange(len(calls[rank])) + 1
            case += f"rank {rank} call {number} ({calls[rank][number - 1]})"
            session.send("save", setting.root / "step", version=new, **options, rank=rank,
                         faults=f"any:{number}:{victim}")
        killed = time.monotonic()
        line = session.line()
        # Without the rank no agreement is reached. A signal from outside may come when all is done.
        require(line is None or kind == "time", "save returned:", line)
        session.wait_gone(killed)
    except Failure as failure:
        raise Failure(f"{case}: {failure}") from failure
    finally:
        session.stop()
    counts[f"{kind}, {'all' if victim == 'killall' else 'one'}"] += 1
    counts[f"ranks_per_file={ranks_per_file} overwrite={overwrite} old={is_old}"] += 1

    try:
        require(setting.found("base") == 0, "base")
        require(setting.found("first") == acknowledged, "what save had returned for is not there")
        found = setting.found("step")
        if found is None and is_old and before is not None:
            # Directories that cannot be exchanged: for a moment there is neither, and the next to come puts one back.
            setting.looker.ask("restore", setting.root / "step")
            found = setting.found("step")
            counts["restored"] += 1
        require(found in (before, new), "found version", found, "expected", before, "or", new)
        require(line is None or found == new, "save returned, but its checkpoint is not there")
        counts["found the new one" if found == new else "found the one before"] += 1
        require(setting.names() in (["base", "first"], ["base", "first", "step"]), setting.names())
        tool_accepts(setting.root / ("first" if found is None else "step"))
        counts["kills that left something hidden"] += set(setting.hidden()) > leftovers_before
        # The next save does not mind what is left; not even where somebody has removed the checkpoint meanwhile.
        if random_source.random() < 0.5:
            setting.remove("step")
            next_save = setting.looker.save(setting.root / "step", setting.new_version())
            if next_save[0]["error"]:
                require("already exists" in next_save[0]["error"] and is_old, next_save)
                require(setting.found("step") in (before, new), "something else came back")
        else:
            setting.must_succeed(setting.looker.save(setting.root / "step", setting.new_version(), overwrite=True))
            require(setting.found("step") == setting.version, "the next save")
    except Failure as failure:
        raise Failure(f"{case}: {failure}; there are {sorted(os.listdir(setting.root))}") from failure


def calls_by_scenario(setting):
    calls = {}
    for is_old in (False, True):
        session = Session(RANKS, setting.root, is_old)
        for scenario in SCENARIOS:
            if scenario[2] == is_old:
                for _ in range(2):  # the first makes what stays
                    if not scenario[1]:
                        setting.remove("step")
                    ranks = session.save(setting.root / "step", setting.new_version(), scenario[0], scenario[1],
                                         wants_calls=True)
                    setting.must_succeed(ranks)
                calls[scenario] = [[line.split()[0] for line in run["calls"].splitlines()] for run in ranks]
        session.end()
    return calls


def test_kills(setting):
    calls = calls_by_scenario(setting)
    trials = 340 if IS_LONG else 3  # of each kind
    for trial in range(trials):
        for number, kind in enumerate(("call", "publication", "time")):
            kill_once(setting, calls[SCENARIOS[(trial + number) % 4]], SCENARIOS[(trial + number) % 4], kind)
        if trial % 10 == 9:
            for name in setting.hidden():
                setting.remove(name)
    for kind in ("call", "publication", "time"):
        require(counts[f"{kind}, one"] + counts[f"{kind}, all"] == trials, "never fired:", kind, counts)
    for victims in ("one", "all"):
        require(sum(counts[f"{kind}, {victims}"] for kind in ("call", "publication", "time")), "never killed", victims)
    require(counts["kills that left something hidden"], "no kill left anything: none was in the middle of a save")
    return trials * 3


# --- writers: two jobs and one name ---


def test_writers(setting):
    rounds = 1000 if IS_LONG else 25
    first = Session(2)
    second = Session(2)
    try:
        for number in range(rounds):
            name = f"race-{number}"
            versions = [setting.new_version(), setting.new_version()]
            for session, version in zip((first, second), versions):
                session.send("save", setting.root / name, version=version, ranks_per_file=1 + number % 2,
                             overwrite=False, rank=-1, faults="")
            won = []
            for session, version in zip((first, second), versions):
                errors = {run["error"] for run in session.answer()["ranks"]}
                require(len(errors) == 1, name, "ranks report different errors:", errors)
                if errors == {""}:
                    won.append(version)
                else:
                    require("xists" in errors.pop(), name, "lost for another reason")
            require(len(won) == 1, name, "was won by", len(won))
            counts["won by the first" if won == versions[:1] else "won by the second"] += 1
            require(setting.found(name) == won[0], name, "is not the winner's")
            setting.remove(name)
        require(setting.hidden() == [], "leftovers:", setting.hidden())

        # The same name again and again, and somebody who reads it all the time.
        setting.must_succeed(setting.looker.save(setting.root / "step", setting.new_version()))
        writing = threading.Event()
        writing.set()
        bad = []

        def read_on():
            reader = Session(0)
            try:
                while writing.is_set():
                    run = reader.ask("load", setting.root / "step", rank=-1, faults="")["ranks"][0]
                    # A reader may come too late for the old and too early for the new: it says so.
                    counts["refused a mixture" if run["error"] else "read one of them"] += 1
                    if run["error"].startswith("not of fsdp2"):
                        bad.append(run["error"])
                reader.end()
            except Failure as failure:
                bad.append(str(failure))
            finally:
                reader.stop()

        thread = threading.Thread(target=read_on)
        thread.start()
        try:
            for number in range(rounds):
                versions = [setting.new_version(), setting.new_version()]
                for session, version in zip((first, second), versions):
                    session.send("save", setting.root / "step", version=version, ranks_per_file=1 + number % 2,
                                 overwrite=True, rank=-1, faults="")
                for session in (first, second):
                    setting.must_succeed(session.answer()["ranks"])
                require(setting.found("step") in versions, "found", setting.found("step"), "expected one of", versions)
                counts["overwritten by both"] += 1
        finally:
            writing.clear()
            thread.join()
        require(not bad, "a reader saw a mixture:", bad)
        require(counts["read one of them"] > 0, "the reader never succeeded")
        require(setting.hidden() == [], "leftovers:", setting.hidden())
        first.end()
        second.end()
    finally:
        first.stop()
        second.stop()
    return 2 * rounds


def main():
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp2-fault-") as folder:
        setting = Setting(folder)
        try:
            tried = {"errors": test_errors, "kills": test_kills, "writers": test_writers}[PART](setting)
        except Failure as failure:
            print(f"FAILED (seed {SEED}): {failure}")
            return 1
        finally:
            setting.looker.stop()
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    for name, seconds in longest.items():
        print(f"{seconds:6.2f} s {name}")
    print(f"{PART}: {tried} tried in {time.monotonic() - start:.1f} s, seed {SEED}")
    return 0


sys.exit(main())
