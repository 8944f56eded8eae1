// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause

// Preloaded between a program and the kernel: lets the n-th call on files below a root fail, fall short, or be the
// program's last. Calls go on to the kernel by syscall(2): no other preloaded library, and no order of initialization,
// can get in between.

#include "fault/shim.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace {

struct Fault {
  std::string call;
  int countdown;
  std::string effect;
};

/// Never destroyed: other libraries close files after static destructors have run.
struct State {
  std::mutex mutex;
  std::vector<std::string> roots;
  bool is_old = false;
  std::vector<Fault> faults;
  std::vector<int> pids;
  std::string fired;
  std::string calls;

  State() {
    const char* list = std::getenv("FSDP2_FAULT_ROOT");
    for (std::string_view rest = list == nullptr ? "" : list; !rest.empty();) {
      const std::size_t end = std::min(rest.find(':'), rest.size());
      if (end > 0) roots.emplace_back(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    const char* old = std::getenv("FSDP2_FAULT_OLD");
    is_old = old != nullptr && std::string_view(old) == "1";
  }
};

State& state() {
  static State* const one = new State;
  return *one;
}

int errno_named(const std::string& name) {
  if (name == "EIO") return EIO;
  if (name == "ENOSPC") return ENOSPC;
  if (name == "EMFILE") return EMFILE;
  if (name == "ENOLCK") return ENOLCK;
  if (name == "EINTR") return EINTR;
  if (name == "EACCES") return EACCES;
  if (name == "EOPNOTSUPP") return EOPNOTSUPP;
  if (name == "EINVAL") return EINVAL;
  std::abort();  // a typing error in the test
}

std::string path_of(int descriptor) {
  char link[64];
  char path[PATH_MAX];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = ::readlink(link, path, sizeof path);
  return length <= 0 ? "" : std::string(path, static_cast<std::size_t>(length));
}

std::string path_at(int folder, const char* path) {
  if (path == nullptr || path[0] == '/') return path == nullptr ? "" : path;
  return (folder == AT_FDCWD ? std::string(".") : path_of(folder)) + "/" + path;
}

enum class Action { proceed, fail, fall_short, die };

/// Counts a call, and says what becomes of it; errno is set where it fails.
Action next_action(const char* call, const std::string& path, const std::string& other = "") {
  State& s = state();
  const auto is_ours = [&](const std::string& name) {
    for (const std::string& root : s.roots)
      if (name.starts_with(root)) return true;
    return false;
  };
  if (!is_ours(path) && !is_ours(other)) return Action::proceed;
  const std::lock_guard lock(s.mutex);
  const bool is_scratch = path.starts_with("/memfd:") || path.starts_with("/proc/self/fd/");
  const std::string name = (is_scratch ? "scratch-" : "") + std::string(call);
  const std::string line = name + " " + path + (other.empty() ? "" : " " + other) + "\n";
  s.calls += line;
  for (Fault& fault : s.faults) {
    if (fault.call != name && fault.call != "any") continue;
    if (--fault.countdown != 0) continue;
    s.fired += line;
    if (fault.effect == "short") return Action::fall_short;
    if (fault.effect == "killall") {
      for (const int pid : s.pids)
        if (pid != ::getpid()) ::kill(pid, SIGKILL);
    }
    if (fault.effect == "kill" || fault.effect == "killall") return Action::die;
    errno = errno_named(fault.effect);
    return Action::fail;
  }
  return Action::proceed;
}

/// Whether the call goes on; a process that is to die does so here.
bool proceeds(const char* call, const std::string& path, const std::string& other = "") {
  const Action action = next_action(call, path, other);
  if (action == Action::die) ::kill(::getpid(), SIGKILL);
  return action != Action::fail;
}

/// A transfer of `count` bytes by `transfer(count)`, of which the last one may be partial.
template <class Transfer>
ssize_t transfer_bytes(const char* call, int descriptor, std::size_t count, Transfer&& transfer) {
  const Action action = next_action(call, path_of(descriptor));
  if (action == Action::fail) return -1;
  const bool is_whole = action == Action::proceed || count < 2;
  const ssize_t result = transfer(is_whole ? count : count / 2);
  if (action == Action::die) ::kill(::getpid(), SIGKILL);
  return result;
}

int open_file(const char* call, int folder, const char* path, int flags, va_list list) {
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
  if (!proceeds(call, path_at(folder, path))) return -1;
  return static_cast<int>(::syscall(SYS_openat, folder, path, flags, mode));
}

ssize_t write_file(int descriptor, const void* bytes, std::size_t count) {
  return transfer_bytes("write", descriptor, count,
                        [&](std::size_t part) { return ::syscall(SYS_write, descriptor, bytes, part); });
}

ssize_t pwrite_file(int descriptor, const void* bytes, std::size_t count, off_t offset) {
  return transfer_bytes("pwrite", descriptor, count,
                        [&](std::size_t part) { return ::syscall(SYS_pwrite64, descriptor, bytes, part, offset); });
}

ssize_t read_file(int descriptor, void* bytes, std::size_t count) {
  return transfer_bytes("read", descriptor, count,
                        [&](std::size_t part) { return ::syscall(SYS_read, descriptor, bytes, part); });
}

ssize_t pread_file(int descriptor, void* bytes, std::size_t count, off_t offset) {
  return transfer_bytes("pread", descriptor, count,
                        [&](std::size_t part) { return ::syscall(SYS_pread64, descriptor, bytes, part, offset); });
}

ssize_t preadv_file(int descriptor, const iovec* parts, int count, off_t offset) {
  std::size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += parts[i].iov_len;
  return transfer_bytes("preadv", descriptor, bytes, [&](std::size_t limit) {
    std::vector<iovec> some(parts, parts + count);
    for (iovec& part : some) {
      part.iov_len = std::min(part.iov_len, limit);
      limit -= part.iov_len;
    }
    return ::syscall(SYS_preadv, descriptor, some.data(), some.size(), offset, 0);  // 0: the offset's high half
  });
}

int reserve_file(int descriptor, int mode, off_t offset, off_t length) {
  const std::string path = path_of(descriptor);
  if (!proceeds("fallocate", path)) return -1;
  if (state().is_old) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, length));
}

int truncate_file(int descriptor, off_t length) {
  if (!proceeds("ftruncate", path_of(descriptor))) return -1;
  return static_cast<int>(::syscall(SYS_ftruncate, descriptor, length));
}

}  // namespace

extern "C" {

void fsdp2_fault_arm(const char* faults, const int* pids, int pid_count) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.fired.clear();
  s.calls.clear();
  s.faults.clear();
  s.pids.assign(pids, pids + pid_count);
  for (std::string_view rest = faults; !rest.empty();) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(one.size() + 1, rest.size()));
    const std::size_t first = one.find(':');
    const std::size_t second = one.find(':', first + 1);
    if (second == std::string_view::npos) std::abort();  // a typing error in the test
    s.faults.push_back({std::string(one.substr(0, first)),
                        std::atoi(std::string(one.substr(first + 1, second - first - 1)).c_str()),
                        std::string(one.substr(second + 1))});
  }
}

const char* fsdp2_fault_fired() {
  return state().fired.c_str();
}

const char* fsdp2_fault_calls() {
  return state().calls.c_str();
}

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const int result = open_file("open", AT_FDCWD, path, flags, list);
  va_end(list);
  return result;
}
int openat(int folder, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const int result = open_file("openat", folder, path, flags, list);
  va_end(list);
  return result;
}

ssize_t write(int descriptor, const void* bytes, std::size_t count) {
  return write_file(descriptor, bytes, count);
}
ssize_t pwrite(int descriptor, const void* bytes, std::size_t count, off_t offset) {
  return pwrite_file(descriptor, bytes, count, offset);
}
ssize_t read(int descriptor, void* bytes, std::size_t count) {
  return read_file(descriptor, bytes, count);
}
ssize_t pread(int descriptor, void* bytes, std::size_t count, off_t offset) {
  return pread_file(descriptor, bytes, count, offset);
}
ssize_t preadv(int descriptor, const iovec* parts, int count, off_t offset) {
  return preadv_file(descriptor, parts, count, offset);
}

int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  return reserve_file(descriptor, mode, offset, length);
}
int ftruncate(int descriptor, off_t length) noexcept {
  return truncate_file(descriptor, length);
}

int fsync(int descriptor) {
  if (!proceeds("fsync", path_of(descriptor))) return -1;
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
int fdatasync(int descriptor) {
  if (!proceeds("fdatasync", path_of(descriptor))) return -1;
  return static_cast<int>(::syscall(SYS_fdatasync, descriptor));
}

/// As on Linux, a descriptor is gone even where close fails. Only those that were written through are counted.
int close(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  const bool is_written = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
  const bool is_good = !is_written || proceeds("close", path_of(descriptor));
  const int error = errno;
  const int result = static_cast<int>(::syscall(SYS_close, descriptor));
  if (is_good) return result;
  errno = error;
  return -1;
}

int rename(const char* from, const char* to) noexcept {
  if (!proceeds("rename", path_at(AT_FDCWD, from), path_at(AT_FDCWD, to))) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (!proceeds("renameat2", path_at(from_folder, from), path_at(to_folder, to))) return -1;
  if (state().is_old && flags != 0) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (!proceeds("mkdir", path_at(AT_FDCWD, path))) return -1;
  return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
int unlink(const char* path) noexcept {
  if (!proceeds("unlink", path_at(AT_FDCWD, path))) return -1;
  return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
int unlinkat(int folder, const char* path, int flags) noexcept {
  if (!proceeds("unlinkat", path_at(folder, path))) return -1;
  return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
}

}  // extern "C"
