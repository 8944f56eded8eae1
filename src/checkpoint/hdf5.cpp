// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/hdf5.hpp"

#include <fmt/format.h>
#include <hdf5.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "checkpoint/file.hpp"
#include "fsdp2/error.hpp"

namespace fsdp2::checkpoint {

namespace {

template <herr_t (*close)(hid_t)>
struct IdTraits {
  using Type = hid_t;
  static constexpr hid_t invalid() { return -1; }
  static void release(hid_t id) { (void)close(id); }
};
using FileId = UniqueHandle<IdTraits<H5Fclose>>;
using GroupId = UniqueHandle<IdTraits<H5Gclose>>;
using DatasetId = UniqueHandle<IdTraits<H5Dclose>>;
using SpaceId = UniqueHandle<IdTraits<H5Sclose>>;
using TypeId = UniqueHandle<IdTraits<H5Tclose>>;
using PropertyId = UniqueHandle<IdTraits<H5Pclose>>;
using AttributeId = UniqueHandle<IdTraits<H5Aclose>>;

/// HDF5 prints errors through a handler that belongs to the user: it is silent while we work and restored afterwards.
class QuietErrors {
 public:
  QuietErrors() {
    is_saved_ = H5Eget_auto2(H5E_DEFAULT, &handler_, &data_) >= 0;
    if (is_saved_) H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  QuietErrors(const QuietErrors&) = delete;
  QuietErrors& operator=(const QuietErrors&) = delete;
  ~QuietErrors() {
    if (is_saved_) H5Eset_auto2(H5E_DEFAULT, handler_, data_);
  }

 private:
  H5E_auto2_t handler_ = nullptr;
  void* data_ = nullptr;
  bool is_saved_ = false;
};

/// The innermost description on HDF5's error stack.
std::string last_error() {
  std::string text;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned index, const H5E_error2_t* error, void* data) -> herr_t {
        if (index == 0 && error->desc != nullptr) *static_cast<std::string*>(data) = error->desc;
        return 0;
      },
      &text);
  return text.empty() ? "no reason given" : text;
}

/// The errno with which a system call of HDF5's failed, as the innermost error on its stack tells; 0 if none did.
int system_error() {
  int found = 0;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned index, const H5E_error2_t* error, void* data) -> herr_t {
        if (index != 0 || error->desc == nullptr || error->func_name == nullptr) return 0;
        const char* text = std::strstr(error->desc, "errno = ");
        if (text != nullptr && std::string_view(error->func_name).starts_with("H5FD_"))
          *static_cast<int*>(data) = std::atoi(text + std::strlen("errno = "));
        return 0;
      },
      &found);
  return found;
}

/// Passes a result of HDF5 through, or throws ErrorType where it is negative; IoError where the system is to blame: a
/// file that cannot be read now is not a damaged one.
template <class ErrorType, class Result>
Result check(Result result, std::string_view call, const std::filesystem::path& path, std::string_view object = "") {
  if (result >= 0) return result;
  const std::string message =
      fmt::format("{} on {}{}{} failed: {}", call, path.string(), object.empty() ? "" : ":", object, last_error());
  if (system_error() != 0) throw IoError(message);
  throw ErrorType(message);
}

TypeId small_float(std::size_t mantissa_bits, std::size_t exponent_bits, std::size_t bias) {
  TypeId type(H5Tcopy(H5T_IEEE_F32LE));
  const std::size_t sign = mantissa_bits + exponent_bits;
  if (H5Tset_fields(type.get(), sign, mantissa_bits, exponent_bits, 0, mantissa_bits) < 0 ||
      H5Tset_size(type.get(), 2) < 0 || H5Tset_ebias(type.get(), bias) < 0)
    throw IoError("HDF5 cannot describe a 16-bit float");
  return type;
}

TypeId complex_of(hid_t part, std::size_t part_bytes) {
  TypeId type(H5Tcreate(H5T_COMPOUND, 2 * part_bytes));
  if (H5Tinsert(type.get(), "r", 0, part) < 0 || H5Tinsert(type.get(), "i", part_bytes, part) < 0)
    throw IoError("HDF5 cannot describe a complex number");
  return type;
}

TypeId boolean() {
  TypeId type(H5Tenum_create(H5T_STD_I8LE));
  const std::int8_t values[] = {0, 1};
  if (H5Tenum_insert(type.get(), "FALSE", &values[0]) < 0 || H5Tenum_insert(type.get(), "TRUE", &values[1]) < 0)
    throw IoError("HDF5 cannot describe a bool");
  return type;
}

/// The type in the file: FORMAT.md §2.
TypeId stored_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return TypeId(H5Tcopy(H5T_IEEE_F64LE));
    case DType::f32:
      return TypeId(H5Tcopy(H5T_IEEE_F32LE));
    case DType::f16:
      return small_float(10, 5, 15);
    case DType::bf16:
      return small_float(7, 8, 127);
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::u8:
      return TypeId(H5Tcopy(H5T_STD_U8LE));
    case DType::i64:
      return TypeId(H5Tcopy(H5T_STD_I64LE));
    case DType::i32:
      return TypeId(H5Tcopy(H5T_STD_I32LE));
    case DType::i16:
      return TypeId(H5Tcopy(H5T_STD_I16LE));
    case DType::i8:
      return TypeId(H5Tcopy(H5T_STD_I8LE));
    case DType::u64:
      return TypeId(H5Tcopy(H5T_STD_U64LE));
    case DType::u32:
      return TypeId(H5Tcopy(H5T_STD_U32LE));
    case DType::u16:
      return TypeId(H5Tcopy(H5T_STD_U16LE));
    case DType::boolean:
      return boolean();
    case DType::complex64:
      return complex_of(H5T_IEEE_F32LE, 4);
    case DType::complex128:
      return complex_of(H5T_IEEE_F64LE, 8);
  }
  throw IoError("unknown dtype");
}

std::vector<hsize_t> to_hsize(const Shape& shape) {
  return {shape.begin(), shape.end()};
}

SpaceId simple_space(const Shape& shape) {
  const std::vector<hsize_t> dims = to_hsize(shape);
  return SpaceId(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
}

/// A sparse file in memory: HDF5 must write its structure somewhere. It has no place in any file system, so a killed
/// process leaves nothing, and a full /dev/shm matters to nobody: HDF5 1.10 crashes at exit after a failed close.
class ScratchFile {
 public:
  ScratchFile() : descriptor_(::memfd_create("fsdp2-skeleton", MFD_CLOEXEC)) {
    if (!descriptor_.is_valid())
      throw IoError(fmt::format("making a scratch file in memory failed: {} (errno {})", std::strerror(errno), errno));
    path_ = fmt::format("/proc/self/fd/{}", descriptor_.get());
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  UniqueHandle<DescriptorTraits> descriptor_;
  std::filesystem::path path_;
};

/// HDF5 crashes at exit where the process may not write files of that size, also sparse ones in memory.
void check_file_size_limit(const std::map<std::string, DatasetSpec>& datasets, std::size_t views) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  std::int64_t bytes = checked_multiply(static_cast<std::int64_t>(datasets.size() + views + 16), 8192);
  for (const auto& [name, spec] : datasets)
    bytes = checked_add(bytes, checked_multiply(numel(spec.shape), size_of(spec.type)));
  if (static_cast<rlim_t>(bytes) > limit.rlim_cur)
    throw IoError(fmt::format("a file of up to {} bytes is needed, but this process may write {} (RLIMIT_FSIZE)", bytes,
                              limit.rlim_cur));
}

bool has_nan(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::f32:
    case DType::f16:
    case DType::bf16:
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::complex64:
    case DType::complex128:
      return true;
    default:
      return false;
  }
}

void write_attribute(hid_t file, const std::filesystem::path& path, const std::string& name, hid_t type,
                     const void* value) {
  const SpaceId space(check<IoError>(H5Screate(H5S_SCALAR), "H5Screate", path));
  const AttributeId attribute(check<IoError>(
      H5Acreate2(file, name.c_str(), type, space.get(), H5P_DEFAULT, H5P_DEFAULT), "H5Acreate2", path, name));
  check<IoError>(H5Awrite(attribute.get(), type, value), "H5Awrite", path, name);
}

void write_attributes(hid_t file, const std::filesystem::path& path, const RootAttributes& attributes) {
  for (const auto& [name, value] : attributes.numbers) write_attribute(file, path, name, H5T_STD_I64LE, &value);
  for (const auto& [name, value] : attributes.texts) {
    const TypeId type(check<IoError>(H5Tcopy(H5T_C_S1), "H5Tcopy", path));
    check<IoError>(H5Tset_size(type.get(), std::max<std::size_t>(value.size(), 1)), "H5Tset_size", path);
    check<IoError>(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), "H5Tset_strpad", path);
    write_attribute(file, path, name, type.get(), value.empty() ? "" : value.data());
  }
}

void create_view(hid_t file, const std::filesystem::path& path, const NamedView& view) {
  const PropertyId creation(check<IoError>(H5Pcreate(H5P_DATASET_CREATE), "H5Pcreate", path));
  check<IoError>(H5Pset_obj_track_times(creation.get(), false), "H5Pset_obj_track_times", path);
  const bool is_scalar = view.shape.empty();  // HDF5 has no virtual scalars
  const SpaceId space = simple_space(is_scalar ? Shape{1} : view.shape);
  const TypeId type = stored_type(view.type);
  for (const ViewPart& part : view.parts) {
    const std::vector<hsize_t> offset = is_scalar ? std::vector<hsize_t>{0} : to_hsize(part.box.offset);
    const std::vector<hsize_t> extent = is_scalar ? std::vector<hsize_t>{1} : to_hsize(part.box.extent);
    check<IoError>(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, offset.data(), nullptr, extent.data(), nullptr),
                   "H5Sselect_hyperslab", path, view.path);
    const SpaceId source = simple_space({part.source_elements});
    const auto start = static_cast<hsize_t>(part.start);
    const auto count = static_cast<hsize_t>(part.box.numel());
    check<IoError>(H5Sselect_hyperslab(source.get(), H5S_SELECT_SET, &start, nullptr, &count, nullptr),
                   "H5Sselect_hyperslab", path, view.path);
    check<IoError>(H5Pset_virtual(creation.get(), space.get(), part.file.c_str(), part.source.c_str(), source.get()),
                   "H5Pset_virtual", path, view.path);
  }
  if (has_nan(view.type)) {
    const std::vector<unsigned char> nan(static_cast<std::size_t>(size_of(view.type)), 0xff);  // in all of them
    check<IoError>(H5Pset_fill_value(creation.get(), type.get(), nan.data()), "H5Pset_fill_value", path, view.path);
  }
  check<IoError>(H5Sselect_all(space.get()), "H5Sselect_all", path, view.path);
  const DatasetId dataset(check<IoError>(
      H5Dcreate2(file, view.path.c_str(), type.get(), space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT),
      "H5Dcreate2", path, view.path));
}

struct InfoTraits {
  using Type = MPI_Info;
  static MPI_Info invalid() { return MPI_INFO_NULL; }
  static void release(MPI_Info info) { MPI_Info_free(&info); }
};
using Info = UniqueHandle<InfoTraits>;

void check_file_call(int code, std::string_view call, const std::filesystem::path& path) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) length = 0;
  throw IoError(fmt::format("{} for {} failed: {}", call, path.string(),
                            std::string_view(text.data(), static_cast<std::size_t>(length))));
}

Info make_info(const std::filesystem::path& path, const MpiHints& hints) {
  MPI_Info made = MPI_INFO_NULL;
  check_file_call(MPI_Info_create(&made), "MPI_Info_create", path);
  Info info(made);
  for (const auto& [name, value] : hints)
    check_file_call(MPI_Info_set(info.get(), name.c_str(), value.c_str()), "MPI_Info_set", path);
  return info;
}

constexpr std::size_t superblock_bytes = 48;

/// Bob Jenkins' lookup3 (hashlittle, public domain): the checksum of HDF5's metadata, with initial value 0.
std::uint32_t lookup3(std::span<const std::byte> bytes) {
  const auto rotate = [](std::uint32_t x, int k) { return (x << k) | (x >> (32 - k)); };
  const auto word = [&](std::size_t at) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 4 && at + i < bytes.size(); ++i)
      value |= static_cast<std::uint32_t>(bytes[at + i]) << (8 * i);
    return value;
  };
  std::uint32_t a = 0xdeadbeefu + static_cast<std::uint32_t>(bytes.size());
  std::uint32_t b = a;
  std::uint32_t c = a;
  std::size_t at = 0;
  for (; bytes.size() - at > 12; at += 12) {
    a += word(at);
    b += word(at + 4);
    c += word(at + 8);
    a -= c, a ^= rotate(c, 4), c += b;
    b -= a, b ^= rotate(a, 6), a += c;
    c -= b, c ^= rotate(b, 8), b += a;
    a -= c, a ^= rotate(c, 16), c += b;
    b -= a, b ^= rotate(a, 19), a += c;
    c -= b, c ^= rotate(b, 4), b += a;
  }
  a += word(at);
  b += word(at + 4);
  c += word(at + 8);
  c ^= b, c -= rotate(b, 14);
  a ^= c, a -= rotate(c, 11);
  b ^= a, b -= rotate(a, 25);
  c ^= b, c -= rotate(b, 16);
  a ^= c, a -= rotate(c, 4);
  b ^= a, b -= rotate(a, 14);
  c ^= b, c -= rotate(b, 24);
  return c;
}

std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = (value << 8) | static_cast<std::uint64_t>(bytes[i]);
  return value;
}

/// HDF5 file format specification, "superblock version 2 and 3". Returns the size of the file.
std::int64_t check_superblock(const std::filesystem::path& path) {
  const File file = File::open(path);
  const std::int64_t size = file.size();
  const auto refuse = [&](std::string_view why) { throw CorruptError(fmt::format("{} {}", path.string(), why)); };
  if (size < static_cast<std::int64_t>(superblock_bytes)) refuse("is too short to be an HDF5 file");
  std::array<std::byte, superblock_bytes> block{};
  file.read(block, 0);
  constexpr unsigned char signature[] = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
  if (std::memcmp(block.data(), signature, sizeof signature) != 0)
    refuse("is not an HDF5 file: its signature is missing");
  const std::span<const std::byte> bytes(block);
  if (bytes[8] != std::byte{3} || bytes[9] != std::byte{8} || bytes[10] != std::byte{8})
    refuse("has an HDF5 superblock of another version than 3: it was not written by fsdp2");
  if (little_endian(bytes.subspan(44, 4)) != lookup3(bytes.first(44)))
    refuse("has a damaged HDF5 superblock: its checksum is wrong");
  if (little_endian(bytes.subspan(12, 8)) != 0) refuse("has an HDF5 base address other than 0");
  const std::uint64_t end = little_endian(bytes.subspan(28, 8));
  if (end != static_cast<std::uint64_t>(size))
    refuse(fmt::format("has {} bytes, but its superblock says {}: it is truncated or extended", size, end));
  return size;
}

}  // namespace

void Hdf5FileTraits::release(std::int64_t id) {
  (void)H5Fclose(id);
}

Skeleton build_skeleton(const std::map<std::string, DatasetSpec>& datasets, const std::vector<NamedView>& views,
                        const RootAttributes& attributes) {
  const QuietErrors quiet;
  check_file_size_limit(datasets, views.size());
  const ScratchFile scratch;
  const std::filesystem::path& path = scratch.path();
  const PropertyId access(check<IoError>(H5Pcreate(H5P_FILE_ACCESS), "H5Pcreate", path));
  check<IoError>(H5Pset_fapl_stdio(access.get()), "H5Pset_fapl_stdio", path);
  check<IoError>(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110), "H5Pset_libver_bounds", path);
  constexpr hsize_t page = 4096;
  check<IoError>(H5Pset_alignment(access.get(), page, page), "H5Pset_alignment", path);
  const PropertyId file_creation(check<IoError>(H5Pcreate(H5P_FILE_CREATE), "H5Pcreate", path));
  check<IoError>(H5Pset_obj_track_times(file_creation.get(), false), "H5Pset_obj_track_times", path);
  const PropertyId group_creation(check<IoError>(H5Pcreate(H5P_GROUP_CREATE), "H5Pcreate", path));
  check<IoError>(H5Pset_obj_track_times(group_creation.get(), false), "H5Pset_obj_track_times", path);
  const PropertyId creation(check<IoError>(H5Pcreate(H5P_DATASET_CREATE), "H5Pcreate", path));
  check<IoError>(H5Pset_obj_track_times(creation.get(), false), "H5Pset_obj_track_times", path);
  check<IoError>(H5Pset_layout(creation.get(), H5D_CONTIGUOUS), "H5Pset_layout", path);
  check<IoError>(H5Pset_alloc_time(creation.get(), H5D_ALLOC_TIME_EARLY), "H5Pset_alloc_time", path);
  check<IoError>(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER), "H5Pset_fill_time", path);

  Skeleton skeleton;
  {
    FileId file(
        check<IoError>(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, file_creation.get(), access.get()), "H5Fcreate", path));
    write_attributes(file.get(), path, attributes);
    const auto make_group_of = [&](const std::string& name) {
      const std::string group = name.substr(0, name.rfind('/'));
      if (group.empty() ||
          check<IoError>(H5Lexists(file.get(), group.c_str(), H5P_DEFAULT), "H5Lexists", path, group) != 0)
        return;
      const GroupId made(
          check<IoError>(H5Gcreate2(file.get(), group.c_str(), H5P_DEFAULT, group_creation.get(), H5P_DEFAULT),
                         "H5Gcreate2", path, group));
    };
    for (const auto& [name, spec] : datasets) {
      make_group_of(name);
      const TypeId type = stored_type(spec.type);
      const SpaceId space = simple_space(spec.shape);
      const DatasetId dataset(check<IoError>(
          H5Dcreate2(file.get(), name.c_str(), type.get(), space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT),
          "H5Dcreate2", path, name));
      DatasetPlace place{spec.shape, 0, checked_multiply(numel(spec.shape), size_of(spec.type))};
      if (place.bytes != 0) {
        const haddr_t offset = H5Dget_offset(dataset.get());
        if (offset == HADDR_UNDEF)
          throw IoError(fmt::format("HDF5 gave {} no place in the file: {}", name, last_error()));
        place.offset = static_cast<std::int64_t>(offset);
      }
      skeleton.places.emplace(name, std::move(place));
    }
    for (const NamedView& view : views) {
      make_group_of(view.path);
      create_view(file.get(), path, view);
    }
    check<IoError>(H5Fclose(file.detach()), "H5Fclose", path);
  }

  const File file = File::open(path);
  skeleton.file_size = file.size();
  std::vector<std::pair<std::int64_t, std::int64_t>> occupied;
  for (const auto& [name, place] : skeleton.places)
    if (place.bytes != 0) occupied.emplace_back(place.offset, place.offset + place.bytes);
  occupied.emplace_back(skeleton.file_size, skeleton.file_size);
  std::sort(occupied.begin(), occupied.end());
  std::int64_t at = 0;
  for (const auto& [begin, end] : occupied) {
    if (begin > at) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(begin - at));
      file.read(bytes, at);
      skeleton.metadata.emplace_back(at, std::move(bytes));
    }
    at = end;
  }
  return skeleton;
}

void create_by_mpi(const std::filesystem::path& path, const MpiHints& hints) {
  const Info info = make_info(path, hints);
  MPI_File file = MPI_FILE_NULL;
  check_file_call(
      MPI_File_open(MPI_COMM_SELF, path.c_str(), MPI_MODE_CREATE | MPI_MODE_EXCL | MPI_MODE_RDWR, info.get(), &file),
      "MPI_File_open", path);
  check_file_call(MPI_File_close(&file), "MPI_File_close", path);
}

MpioFile::MpioFile(const std::filesystem::path& path, MPI_Comm comm, const MpiHints& hints, Transfer transfer)
    : path_(path), transfer_(transfer) {
  const QuietErrors quiet;
  const Info info = make_info(path, hints);
  const PropertyId access(check<IoError>(H5Pcreate(H5P_FILE_ACCESS), "H5Pcreate", path));
  check<IoError>(H5Pset_fapl_mpio(access.get(), comm, info.get()), "H5Pset_fapl_mpio", path);
  file_ = check<IoError>(H5Fopen(path.c_str(), H5F_ACC_RDWR, access.get()), "H5Fopen", path);
}

void MpioFile::write(const std::string& dataset, std::int64_t start, std::span<const std::byte> bytes) {
  const QuietErrors quiet;
  const DatasetId id(check<IoError>(H5Dopen2(file_, dataset.c_str(), H5P_DEFAULT), "H5Dopen2", path_, dataset));
  const TypeId type(check<IoError>(H5Dget_type(id.get()), "H5Dget_type", path_, dataset));
  const SpaceId space(check<IoError>(H5Dget_space(id.get()), "H5Dget_space", path_, dataset));
  const int dimensions =
      check<IoError>(H5Sget_simple_extent_ndims(space.get()), "H5Sget_simple_extent_ndims", path_, dataset);
  std::vector<hsize_t> count(static_cast<std::size_t>(dimensions));
  check<IoError>(H5Sget_simple_extent_dims(space.get(), count.data(), nullptr), "H5Sget_simple_extent_dims", path_,
                 dataset);
  hsize_t row_bytes = H5Tget_size(type.get());
  for (std::size_t d = 1; d < count.size(); ++d) row_bytes *= count[d];
  std::vector<hsize_t> first(count.size(), 0);
  first[0] = static_cast<hsize_t>(start) / row_bytes;
  count[0] = std::max<hsize_t>(bytes.size() / row_bytes, 1);
  const SpaceId memory(
      check<IoError>(H5Screate_simple(dimensions, count.data(), nullptr), "H5Screate_simple", path_, dataset));
  if (bytes.empty()) {
    check<IoError>(H5Sselect_none(space.get()), "H5Sselect_none", path_, dataset);
    check<IoError>(H5Sselect_none(memory.get()), "H5Sselect_none", path_, dataset);
  } else {
    check<IoError>(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, first.data(), nullptr, count.data(), nullptr),
                   "H5Sselect_hyperslab", path_, dataset);
  }
  const PropertyId properties(check<IoError>(H5Pcreate(H5P_DATASET_XFER), "H5Pcreate", path_));
  const H5FD_mpio_xfer_t mode = transfer_ == Transfer::collective ? H5FD_MPIO_COLLECTIVE : H5FD_MPIO_INDEPENDENT;
  check<IoError>(H5Pset_dxpl_mpio(properties.get(), mode), "H5Pset_dxpl_mpio", path_, dataset);
  // The type of the file is also that in memory: a conversion would change bits, and end collective transfers.
  const std::byte nothing{};
  check<IoError>(H5Dwrite(id.get(), type.get(), memory.get(), space.get(), properties.get(),
                          bytes.empty() ? &nothing : bytes.data()),
                 "H5Dwrite", path_, dataset);
}

void MpioFile::close() {
  const QuietErrors quiet;
  check<IoError>(H5Fclose(std::exchange(file_, -1)), "H5Fclose", path_);
}

Hdf5Structure::Hdf5Structure(const std::filesystem::path& path) : path_(path), file_size_(check_superblock(path)) {
  const QuietErrors quiet;
  const PropertyId access(check<IoError>(H5Pcreate(H5P_FILE_ACCESS), "H5Pcreate", path));
  check<IoError>(H5Pset_fapl_sec2(access.get()), "H5Pset_fapl_sec2", path);
  hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get());
  while (file < 0 && system_error() == EINTR) file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get());
  file_ = UniqueHandle<Hdf5FileTraits>(check<CorruptError>(file, "H5Fopen", path));
}

std::optional<DatasetPlace> Hdf5Structure::find(const std::string& dataset, DType type, std::size_t dimensions) const {
  const QuietErrors quiet;
  const auto refuse = [&](std::string_view why) {
    throw CorruptError(fmt::format("{}:{} {}", path_.string(), dataset, why));
  };
  for (std::size_t end = dataset.find('/', 1); true; end = dataset.find('/', end + 1)) {
    const std::string part = dataset.substr(0, end);
    if (check<CorruptError>(H5Lexists(file_.get(), part.c_str(), H5P_DEFAULT), "H5Lexists", path_, part) == 0)
      return std::nullopt;
    H5L_info_t link{};
    check<CorruptError>(H5Lget_info(file_.get(), part.c_str(), &link, H5P_DEFAULT), "H5Lget_info", path_, part);
    if (link.type != H5L_TYPE_HARD) refuse("is reached by a soft or external link: fsdp2 writes hard links only");
    if (end == std::string::npos) break;
  }
  const DatasetId id(
      check<CorruptError>(H5Dopen2(file_.get(), dataset.c_str(), H5P_DEFAULT), "H5Dopen2", path_, dataset));
  const PropertyId creation(check<CorruptError>(H5Dget_create_plist(id.get()), "H5Dget_create_plist", path_, dataset));
  if (H5Pget_layout(creation.get()) != H5D_CONTIGUOUS) refuse("is not contiguous");
  if (H5Pget_external_count(creation.get()) != 0) refuse("has external storage");
  if (H5Pget_nfilters(creation.get()) != 0) refuse("has filters");
  const TypeId found(check<CorruptError>(H5Dget_type(id.get()), "H5Dget_type", path_, dataset));
  const TypeId expected = stored_type(type);
  if (check<CorruptError>(H5Tequal(found.get(), expected.get()), "H5Tequal", path_, dataset) == 0)
    refuse(fmt::format("has another type than {}", to_string(type)));
  const SpaceId space(check<CorruptError>(H5Dget_space(id.get()), "H5Dget_space", path_, dataset));
  const int rank =
      check<CorruptError>(H5Sget_simple_extent_ndims(space.get()), "H5Sget_simple_extent_ndims", path_, dataset);
  if (rank < 0 || static_cast<std::size_t>(rank) != dimensions || H5Sget_simple_extent_type(space.get()) != H5S_SIMPLE)
    refuse(fmt::format("has {} dimensions: expected {}", rank, dimensions));
  std::vector<hsize_t> dims(dimensions);
  check<CorruptError>(H5Sget_simple_extent_dims(space.get(), dims.data(), nullptr), "H5Sget_simple_extent_dims", path_,
                      dataset);
  DatasetPlace place;
  for (const hsize_t extent : dims) {
    if (extent > static_cast<hsize_t>(file_size_))
      refuse(fmt::format("claims {} elements, more than the file has bytes", extent));
    place.shape.push_back(static_cast<std::int64_t>(extent));
  }
  std::int64_t count = 0;
  try {
    count = checked_multiply(numel(place.shape), size_of(type));
  } catch (const ShapeError& error) {
    refuse(error.what());
  }
  if (count == 0) return place;
  const haddr_t offset = H5Dget_offset(id.get());
  if (offset == HADDR_UNDEF) refuse("has no storage in the file");
  if (count > file_size_ || offset > static_cast<haddr_t>(file_size_ - count))
    refuse(fmt::format("claims {} bytes at {}, outside the file of {} bytes", count, offset, file_size_));
  place.offset = static_cast<std::int64_t>(offset);
  place.bytes = count;
  return place;
}

DatasetPlace Hdf5Structure::require(const std::string& dataset, DType type, std::size_t dimensions) const {
  const std::optional<DatasetPlace> place = find(dataset, type, dimensions);
  if (!place) throw CorruptError(fmt::format("{} has no dataset {}", path_.string(), dataset));
  return *place;
}

}  // namespace fsdp2::checkpoint
