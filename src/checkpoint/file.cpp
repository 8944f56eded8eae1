// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <limits>
#include <new>

#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

constexpr std::size_t max_call_bytes = std::size_t{1} << 30;

[[noreturn]] void fail(std::string_view what, const std::filesystem::path& path, int error) {
  throw IoError(fmt::format("{} {} failed: {} (errno {})", what, path.string(), std::strerror(error), error));
}

template <class Call>
auto retry_interrupted(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

/// Bytes that an unprivileged user can still write to the file system of `path`, for messages: 0 where it does not say.
std::int64_t available_bytes(const std::filesystem::path& path) {
  struct statvfs status {};
  if (retry_interrupted([&] { return ::statvfs(path.c_str(), &status); }) != 0) return 0;
  const std::uint64_t blocks = status.f_bavail;
  const std::uint64_t most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  return static_cast<std::int64_t>(blocks > most / status.f_frsize ? most : blocks * status.f_frsize);
}

}  // namespace

void DescriptorTraits::release(int descriptor) {
  ::close(descriptor);
}

File File::create(const std::filesystem::path& path) {
  const int descriptor = retry_interrupted([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666); });
  if (descriptor < 0) fail("creating", path, errno);
  return File(path, descriptor);
}

File File::open(const std::filesystem::path& path) {
  // A pipe in the place of a file would else be waited for; regular files do not know the difference.
  const int descriptor = retry_interrupted([&] { return ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); });
  if (descriptor < 0) fail("opening", path, errno);
  return File(path, descriptor);
}

std::int64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_.get(), &status) != 0) fail("examining", path_, errno);
  if (!S_ISREG(status.st_mode)) throw IoError(fmt::format("{} is not a regular file", path_.string()));
  return status.st_size;
}

void File::reserve(std::int64_t bytes) {
  if (bytes == 0) return;
  if (retry_interrupted([&] { return ::fallocate(descriptor_.get(), 0, 0, bytes); }) == 0) return;
  // Not glibc's posix_fallocate: where the file system cannot, it writes every block.
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    const int error = errno;
    fail(fmt::format("reserving {} bytes ({} are available) for", bytes, available_bytes(path_.parent_path())), path_,
         error);
  }
  if (retry_interrupted([&] { return ::ftruncate(descriptor_.get(), bytes); }) != 0)
    fail(fmt::format("extending to {} bytes", bytes), path_, errno);
}

void File::write(std::span<const std::byte> bytes, std::int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t written = retry_interrupted(
        [&] { return ::pwrite(descriptor_.get(), bytes.data(), std::min(bytes.size(), max_call_bytes), offset); });
    if (written <= 0)
      fail(fmt::format("writing {} bytes at {} to", bytes.size(), offset), path_, written < 0 ? errno : EIO);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += written;
  }
}

void File::read(std::span<const std::span<std::byte>> parts, std::int64_t offset) const {
  std::vector<iovec> left;
  for (const std::span<std::byte> part : parts)
    if (!part.empty()) left.push_back({part.data(), part.size()});
  for (std::size_t first = 0; first < left.size();) {
    const std::size_t count = std::min(left.size() - first, std::size_t{IOV_MAX});
    ssize_t got = retry_interrupted(
        [&] { return ::preadv(descriptor_.get(), left.data() + first, static_cast<int>(count), offset); });
    if (got < 0) fail(fmt::format("reading {} bytes at {} of", left[first].iov_len, offset), path_, errno);
    if (got == 0)
      throw CorruptError(
          fmt::format("{} ends at {}: expected {} more bytes there", path_.string(), offset, left[first].iov_len));
    offset += got;
    for (; got > 0; first += left[first].iov_len == 0 ? 1 : 0) {
      iovec& part = left[first];
      const std::size_t taken = std::min(part.iov_len, static_cast<std::size_t>(got));
      part.iov_base = static_cast<std::byte*>(part.iov_base) + taken;
      part.iov_len -= taken;
      got -= static_cast<ssize_t>(taken);
    }
  }
}

void File::start_writeback(std::int64_t offset, std::int64_t bytes) {
  (void)::sync_file_range(descriptor_.get(), offset, bytes, SYNC_FILE_RANGE_WRITE);
}

void File::sync() {
  if (::fsync(descriptor_.get()) != 0) fail("fsync of", path_, errno);
}

void File::close() {
  // Linux closes the descriptor even when close is interrupted: it must not be closed again.
  if (::close(descriptor_.detach()) != 0 && errno != EINTR) fail("closing", path_, errno);
}

std::vector<std::byte> buffer_for(const std::filesystem::path& path, std::int64_t bytes) {
  try {
    return std::vector<std::byte>(static_cast<std::size_t>(bytes));
  } catch (const std::bad_alloc&) {
    throw IoError(fmt::format("reading {}: there is no memory for {} bytes of it", path.string(), bytes));
  }
}

bool make_directory(const std::filesystem::path& path) {
  if (retry_interrupted([&] { return ::mkdir(path.c_str(), 0777); }) == 0) return true;
  if (errno != EEXIST) fail("making directory", path, errno);
  return false;
}

void sync_directory(const std::filesystem::path& path) {
  const UniqueHandle<DescriptorTraits> descriptor(
      retry_interrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
  if (!descriptor.is_valid()) fail("opening directory", path, errno);
  if (::fsync(descriptor.get()) != 0) fail("fsync of directory", path, errno);
}

void rename_to_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS) {  // the file system does not know the flag
    struct stat status {};
    if (::lstat(to.c_str(), &status) == 0) fail(fmt::format("renaming {} to", from.string()), to, EEXIST);
    if (::rename(from.c_str(), to.c_str()) == 0) return;
  }
  fail(fmt::format("renaming {} to", from.string()), to, errno);
}

bool exchange(const std::filesystem::path& a, const std::filesystem::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS) return false;
  fail(fmt::format("exchanging {} and", a.string()), b, errno);
}

void remove_file(const std::filesystem::path& path) {
  if (retry_interrupted([&] { return ::unlink(path.c_str()); }) != 0) fail("removing", path, errno);
}

}  // namespace fsdp2::checkpoint
