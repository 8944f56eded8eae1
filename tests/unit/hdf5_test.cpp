// SPDX-FileCopyrightText: 2026 The fsdp2 authors
// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/hdf5.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <ctime>
#include <functional>
#include <thread>

#include "checkpoint/file.hpp"
#include "fsdp2/error.hpp"
#include "support/checkpoint.hpp"
#include "support/scratch_folder.hpp"

namespace fsdp2::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::Bytes;
using testing::file_bytes;
using testing::ScratchFolder;
using testing::write_file;

/// A result of HDF5 that must not be an error.
template <class Result>
Result good(Result result) {
  if (result < 0) throw std::runtime_error("an HDF5 call of the test failed");
  return result;
}

template <class ErrorType = CorruptError>
void expect_refused(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected an error with \"" << part << "\"";
  } catch (const ErrorType& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

/// ---- Skeletons ----

std::map<std::string, DatasetSpec> some_datasets() {
  std::map<std::string, DatasetSpec> datasets;
  for (const DType dtype : all_dtypes) datasets[fmt::format("/data/{}", to_string(dtype))] = {dtype, {1000}};
  datasets["/small"] = {DType::u64, {3}};
  datasets["/empty"] = {DType::u8, {0}};
  datasets["/grid"] = {DType::u64, {4, 17, 2}};
  datasets["/deep/group"] = {DType::u8, {1}};
  return datasets;
}

const RootAttributes some_attributes = {{{"step", -3}, {"world_size", 4}}, {{"library", "text"}, {"nothing", ""}}};

NamedView some_view(const std::string& path, const std::string& source, DType type, std::int64_t start,
                    const Shape& shape) {
  return {path, type, shape, {{Box::whole(shape), ".", source, some_datasets().at(source).shape[0], start}}};
}

Skeleton some_skeleton() {
  return build_skeleton(some_datasets(),
                        {some_view("/tensors/w", "/data/bf16", DType::bf16, 64, {5, 3}),
                         some_view("/tensors/scalar", "/data/f64", DType::f64, 8, {}),
                         some_view("/tensors/\xc3\xa4%2F", "/data/u8", DType::u8, 0, {7})},
                        some_attributes);
}

Bytes content_of(const std::string& name, std::int64_t bytes) {
  return testing::box_bytes(name, DType::u8, {bytes}, Box::whole({bytes}));
}

/// Writes a skeleton, and into every dataset the bytes of its name.
void write_skeleton(const fs::path& path, const Skeleton& skeleton) {
  File file = File::create(path);
  file.reserve(skeleton.file_size);
  for (const auto& [offset, bytes] : skeleton.metadata) file.write(bytes, offset);
  for (const auto& [name, place] : skeleton.places) file.write(content_of(name, place.bytes), place.offset);
  file.close();
}

TEST(Skeleton, IsTheSameEveryTime) {
  const std::time_t begin = std::time(nullptr);
  const Skeleton first = some_skeleton();
  while (std::time(nullptr) <= begin + 1)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // HDF5 has clocks
  const Skeleton second = some_skeleton();
  EXPECT_EQ(first.file_size, second.file_size);
  EXPECT_EQ(first.metadata, second.metadata);
  for (const auto& [name, place] : first.places) {
    EXPECT_EQ(place.offset, second.places.at(name).offset) << name;
    EXPECT_EQ(place.bytes, second.places.at(name).bytes) << name;
  }
}

TEST(Skeleton, MetadataAndDatasetsCoverTheFileOnce) {
  const Skeleton skeleton = some_skeleton();
  std::map<std::int64_t, std::int64_t> parts;
  for (const auto& [offset, bytes] : skeleton.metadata) parts[offset] = static_cast<std::int64_t>(bytes.size());
  for (const auto& [name, place] : skeleton.places)
    if (place.bytes != 0) {
      EXPECT_EQ(parts.count(place.offset), 0u);
      parts[place.offset] = place.bytes;
    }
  std::int64_t end = 0;
  for (const auto& [offset, bytes] : parts) {
    EXPECT_EQ(offset, end);
    end = offset + bytes;
  }
  EXPECT_EQ(end, skeleton.file_size);
  for (const auto& [name, place] : skeleton.places) EXPECT_TRUE(place.bytes < 4096 || place.offset % 4096 == 0) << name;
}

/// HDF5 itself finds what was written past it, bit for bit: memory types equal those in the file.
TEST(Skeleton, Hdf5ReadsWhatWasWrittenAtTheOffsets) {
  const ScratchFolder scratch;
  const Skeleton skeleton = some_skeleton();
  write_skeleton(scratch / "file.h5", skeleton);
  const hid_t file = good(H5Fopen((scratch / "file.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  for (const auto& [name, place] : skeleton.places) {
    const hid_t dataset = good(H5Dopen2(file, name.c_str(), H5P_DEFAULT));
    const hid_t type = good(H5Dget_type(dataset));
    const hid_t space = good(H5Dget_space(dataset));
    std::array<hsize_t, 3> dims{};
    const int rank = good(H5Sget_simple_extent_dims(space, dims.data(), nullptr));
    EXPECT_EQ(Shape(dims.begin(), dims.begin() + rank), place.shape) << name;
    Bytes bytes(static_cast<std::size_t>(place.bytes) + 1);
    good(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()));
    bytes.pop_back();
    EXPECT_EQ(bytes, content_of(name, place.bytes)) << name;
    good(H5Sclose(space));
    good(H5Tclose(type));
    good(H5Dclose(dataset));
  }
  std::int64_t step = 0;
  const hid_t attribute = good(H5Aopen(file, "step", H5P_DEFAULT));
  good(H5Aread(attribute, H5T_NATIVE_INT64, &step));
  good(H5Aclose(attribute));
  EXPECT_EQ(step, -3);

  // 15 bf16 from element 64 of the arena on, as a 5 x 3 matrix.
  const hid_t view = good(H5Dopen2(file, "/tensors/w", H5P_DEFAULT));
  const hid_t type = good(H5Dget_type(view));
  Bytes bytes(30);
  good(H5Dread(view, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()));
  const Bytes arena = content_of("/data/bf16", 2000);
  EXPECT_EQ(bytes, Bytes(arena.begin() + 128, arena.begin() + 158));
  good(H5Tclose(type));
  good(H5Dclose(view));
  EXPECT_GT(good(H5Lexists(file, "/tensors/\xc3\xa4%2F", H5P_DEFAULT)), 0);
  good(H5Fclose(file));
}

/// What the numbers mean to HDF5: a value of each floating-point type.
TEST(Skeleton, TakesNoSpaceForData) {
  constexpr std::int64_t terabytes = std::int64_t{3} << 40;
  const Skeleton skeleton =
      build_skeleton({{"/data/u8", {DType::u8, {terabytes}}}, {"/data/u64", {DType::u64, {5}}}}, {}, some_attributes);
  EXPECT_GT(skeleton.file_size, terabytes);
  EXPECT_EQ(skeleton.places.at("/data/u8").bytes, terabytes);
  std::size_t metadata = 0;
  for (const auto& [offset, bytes] : skeleton.metadata) metadata += bytes.size();
  EXPECT_LT(metadata, std::size_t{1} << 16);
}

TEST(Skeleton, StoredTypesHaveTheirValues) {
  const ScratchFolder scratch;
  const Skeleton skeleton = some_skeleton();
  write_skeleton(scratch / "file.h5", skeleton);
  {
    File raw = File::create(scratch / "file.h5");
    const std::array<std::uint16_t, 2> bf16{0x3fc0, 0xc2f7};
    raw.write(std::as_bytes(std::span(bf16)), skeleton.places.at("/data/bf16").offset);
    const std::array<std::uint16_t, 2> f16{0x3e00, 0xd7b8};
    raw.write(std::as_bytes(std::span(f16)), skeleton.places.at("/data/f16").offset);
    raw.close();
  }
  const hid_t file = good(H5Fopen((scratch / "file.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  for (const char* name : {"/data/bf16", "/data/f16"}) {
    const hid_t dataset = good(H5Dopen2(file, name, H5P_DEFAULT));
    std::vector<float> values(1000);
    good(H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
    EXPECT_EQ(values[0], 1.5f) << name;
    EXPECT_EQ(values[1], -123.5f) << name;
    good(H5Dclose(dataset));
  }
  good(H5Fclose(file));
}

TEST(File, WhatFitsInNoMemoryIsATypedError) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer ends the process instead";
#endif
  expect_refused<IoError>([] { (void)buffer_for("file.h5", std::int64_t{1} << 62); }, "file.h5");
}

/// ---- Structures ----

TEST(Hdf5Structure, FindsThePlacesOfASkeleton) {
  const ScratchFolder scratch;
  const Skeleton skeleton = some_skeleton();
  write_skeleton(scratch / "file.h5", skeleton);
  const Hdf5Structure structure(scratch / "file.h5");
  EXPECT_EQ(structure.file_size(), skeleton.file_size);
  for (const auto& [name, spec] : some_datasets()) {
    const DatasetPlace place = structure.require(name, spec.type, spec.shape.size());
    EXPECT_EQ(place.shape, spec.shape) << name;
    EXPECT_EQ(place.offset, skeleton.places.at(name).offset) << name;
    EXPECT_EQ(place.bytes, skeleton.places.at(name).bytes) << name;
  }
  EXPECT_FALSE(structure.find("/absent", DType::u8, 1));
  EXPECT_FALSE(structure.find("/absent/below", DType::u8, 1));
  EXPECT_FALSE(structure.find("/data/absent", DType::u8, 1));
  EXPECT_THROW(structure.require("/absent", DType::u8, 1), CorruptError);
}

void expect_file_refused(const fs::path& path, const std::string& part) {
  expect_refused([&] { const Hdf5Structure structure(path); }, part);
}

TEST(Hdf5Structure, RefusesDamagedFilesBeforeHdf5SeesThem) {
  const ScratchFolder scratch;
  write_skeleton(scratch / "good.h5", some_skeleton());
  const Bytes whole = file_bytes(scratch / "good.h5");
  const fs::path path = scratch / "bad.h5";
  const auto expect_bytes_refused = [&](Bytes bytes, const std::string& part) {
    write_file(path, bytes);
    expect_file_refused(path, part);
  };
  expect_bytes_refused({}, "too short");
  expect_bytes_refused(Bytes(whole.begin(), whole.begin() + 47), "too short");
  expect_bytes_refused(content_of("noise", 5000), "signature");
  expect_bytes_refused(Bytes(whole.begin(), whole.begin() + 48), "truncated");
  expect_bytes_refused(Bytes(whole.begin(), whole.end() - 1), "truncated");
  Bytes longer = whole;
  longer.push_back({});
  expect_bytes_refused(longer, "extended");
  for (std::size_t at = 0; at < 48; ++at) {
    Bytes flipped = whole;
    flipped[at] ^= std::byte{4};
    expect_bytes_refused(flipped, at < 8 ? "signature" : at < 11 ? "superblock of another version" : "checksum");
  }
  Bytes shifted(512);  // HDF5 would find a superblock there as well
  shifted.insert(shifted.end(), whole.begin(), whole.end());
  expect_bytes_refused(shifted, "signature");
  expect_refused<IoError>([&] { const Hdf5Structure structure(scratch / "absent.h5"); }, "absent.h5");
  expect_refused<IoError>([&] { const Hdf5Structure structure(scratch.path()); }, "not a regular file");
  good(::mkfifo((scratch / "pipe.h5").c_str(), 0600));  // nobody will ever write to it
  expect_refused<IoError>([&] { const Hdf5Structure structure(scratch / "pipe.h5"); }, "not a regular file");
}

hid_t create_file(const fs::path& path, H5F_libver_t version = H5F_LIBVER_V110) {
  const hid_t access = good(H5Pcreate(H5P_FILE_ACCESS));
  good(H5Pset_libver_bounds(access, version == H5F_LIBVER_EARLIEST ? H5F_LIBVER_EARLIEST : version, H5F_LIBVER_V110));
  const hid_t file = good(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access));
  good(H5Pclose(access));
  return file;
}

TEST(Hdf5Structure, RefusesOlderSuperblocks) {
  const ScratchFolder scratch;
  for (const H5F_libver_t version : {H5F_LIBVER_EARLIEST, H5F_LIBVER_V18}) {
    good(H5Fclose(create_file(scratch / "old.h5", version)));
    const Bytes bytes = file_bytes(scratch / "old.h5");
    EXPECT_EQ(bytes[8], std::byte{version == H5F_LIBVER_EARLIEST ? std::uint8_t{0} : std::uint8_t{2}})
        << "of the test's file";
    expect_file_refused(scratch / "old.h5", "superblock of another version than 3");
  }
}

/// A file with one dataset, made by `make(file)`.
class Foreign {
 public:
  explicit Foreign(const std::function<void(hid_t)>& make) {
    const hid_t file = create_file(scratch / "foreign.h5");
    make(file);
    good(H5Fclose(file));
  }
  void expect_refused(const std::string& part, DType type = DType::u8, std::size_t dimensions = 1,
                      const std::string& dataset = "/d") const {
    const Hdf5Structure structure(scratch / "foreign.h5");
    checkpoint::expect_refused([&] { structure.find(dataset, type, dimensions); }, part);
  }
  const ScratchFolder scratch;
};

/// 100 bytes in a dataset of the given properties, or with the default ones.
void create_dataset(hid_t file, const char* name, const std::function<void(hid_t)>& set = {}, hid_t type = H5T_STD_U8LE,
                    std::vector<hsize_t> dims = {100}, bool is_written = true) {
  const hid_t properties = good(H5Pcreate(H5P_DATASET_CREATE));
  if (set) set(properties);
  const hid_t space = good(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  const hid_t dataset = good(H5Dcreate2(file, name, type, space, H5P_DEFAULT, properties, H5P_DEFAULT));
  const std::vector<std::uint8_t> values(8 * 100, 7);
  if (is_written) good(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
  good(H5Dclose(dataset));
  good(H5Sclose(space));
  good(H5Pclose(properties));
}

TEST(Hdf5Structure, AcceptsAPlainForeignDataset) {
  const Foreign foreign([](hid_t file) { create_dataset(file, "/d"); });
  const Hdf5Structure structure(foreign.scratch / "foreign.h5");
  EXPECT_EQ(structure.require("/d", DType::u8, 1).bytes, 100);
}

TEST(Hdf5Structure, RefusesWhatIsNotPlainlyInTheFile) {
  Foreign([](hid_t file) {
    create_dataset(file, "/d", [](hid_t p) {
      const hsize_t chunk = 10;
      good(H5Pset_chunk(p, 1, &chunk));
    });
  }).expect_refused("not contiguous");
  Foreign([](hid_t file) {
    create_dataset(file, "/d", [](hid_t p) {
      const hsize_t chunk = 10;
      good(H5Pset_chunk(p, 1, &chunk));
      good(H5Pset_fletcher32(p));
    });
  }).expect_refused("not contiguous");
  Foreign([](hid_t file) {
    create_dataset(file, "/d", [](hid_t p) { good(H5Pset_layout(p, H5D_COMPACT)); });
  }).expect_refused("not contiguous");
  Foreign([](hid_t file) {
    create_dataset(file, "/source");
    create_dataset(
        file, "/d",
        [](hid_t p) {
          const hsize_t size = 100;
          const hid_t space = good(H5Screate_simple(1, &size, nullptr));
          good(H5Pset_virtual(p, space, ".", "/source", space));
          good(H5Sclose(space));
        },
        H5T_STD_U8LE, {100}, false);
  }).expect_refused("not contiguous");
  Foreign([](hid_t file) {
    create_dataset(
        file, "/d", [](hid_t p) { good(H5Pset_external(p, "/dev/null", 0, 100)); }, H5T_STD_U8LE, {100}, false);
  }).expect_refused("external storage");
  Foreign([](hid_t file) { create_dataset(file, "/d", {}, H5T_STD_U8LE, {100}, false); }).expect_refused("no storage");
  Foreign([](hid_t file) {
    good(H5Gclose(good(H5Gcreate2(file, "/d", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT))));
  }).expect_refused("H5Dopen2");
}

TEST(Hdf5Structure, RefusesLinksThatAreNotHard) {
  const auto soft = [](hid_t file) {
    create_dataset(file, "/target");
    good(H5Lcreate_soft("/target", file, "/d", H5P_DEFAULT, H5P_DEFAULT));
  };
  Foreign(soft).expect_refused("soft or external link");
  Foreign([](hid_t file) {
    good(H5Lcreate_soft("/nowhere", file, "/d", H5P_DEFAULT, H5P_DEFAULT));
  }).expect_refused("soft or external link");
  Foreign([](hid_t file) {
    good(H5Lcreate_external("other.h5", "/x", file, "/d", H5P_DEFAULT, H5P_DEFAULT));
  }).expect_refused("soft or external link");
  const auto soft_group = [](hid_t file) {
    good(H5Gclose(good(H5Gcreate2(file, "/real", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT))));
    create_dataset(file, "/real/d");
    good(H5Lcreate_soft("/real", file, "/group", H5P_DEFAULT, H5P_DEFAULT));
  };
  Foreign(soft_group).expect_refused("soft or external link", DType::u8, 1, "/group/d");
  Foreign([](hid_t file) { create_dataset(file, "/group"); }).expect_refused("H5Lexists", DType::u8, 1, "/group/d");
}

TEST(Hdf5Structure, RefusesOtherTypesAndDimensions) {
  const Foreign bytes([](hid_t file) { create_dataset(file, "/d"); });
  for (const DType dtype : all_dtypes)
    if (dtype != DType::u8 && dtype != DType::f8_e4m3 && dtype != DType::f8_e5m2)
      bytes.expect_refused(fmt::format("another type than {}", to_string(dtype)), dtype);
  bytes.expect_refused("has 1 dimensions: expected 2", DType::u8, 2);
  bytes.expect_refused("has 1 dimensions: expected 0", DType::u8, 0);
  Foreign([](hid_t file) {
    create_dataset(file, "/d", {}, H5T_STD_U8LE, {10, 10});
  }).expect_refused("has 2 dimensions");
  Foreign([](hid_t file) {
    create_dataset(file, "/d", {}, H5T_STD_U64BE, {10});
  }).expect_refused("another type", DType::u64);
  Foreign([](hid_t file) {
    create_dataset(file, "/d", {}, H5T_STD_I64LE, {10});
  }).expect_refused("another type", DType::u64);
  Foreign([](hid_t file) {
    create_dataset(file, "/d", {}, H5T_IEEE_F64LE, {10});
  }).expect_refused("another type", DType::u64);
  Foreign([](hid_t file) {
    const hid_t space = good(H5Screate(H5S_NULL));
    good(H5Dclose(good(H5Dcreate2(file, "/d", H5T_STD_U8LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT))));
    good(H5Sclose(space));
  }).expect_refused("dimensions", DType::u8, 0);
}

TEST(Hdf5Structure, RefusesClaimsBeyondTheFile) {
  const std::vector<std::vector<hsize_t>> claims{
      {hsize_t{1} << 40}, {1 << 20}, {7, hsize_t{1} << 40}, {hsize_t{1} << 40, 0}};
  for (const std::vector<hsize_t>& dims : claims) {
    const auto properties = [](hid_t p) {
      good(H5Pset_alloc_time(p, H5D_ALLOC_TIME_LATE));
      good(H5Pset_fill_time(p, H5D_FILL_TIME_NEVER));
    };
    Foreign([&](hid_t file) {
      create_dataset(file, "/d", properties, H5T_STD_U8LE, dims, false);
    }).expect_refused("elements, more than the file", DType::u8, dims.size());
  }
}

TEST(Hdf5Structure, LeavesTheErrorHandlerOfTheUserInPlace) {
  H5E_auto2_t before = nullptr;
  void* before_data = nullptr;
  good(H5Eget_auto2(H5E_DEFAULT, &before, &before_data));
  Foreign([](hid_t file) { create_dataset(file, "/d"); }).expect_refused("another type", DType::u64);
  some_skeleton();
  H5E_auto2_t after = nullptr;
  void* after_data = nullptr;
  good(H5Eget_auto2(H5E_DEFAULT, &after, &after_data));
  EXPECT_EQ(before, after);
  EXPECT_EQ(before_data, after_data);
}

TEST(Hdf5Structure, LeavesNothingOpen) {
  const ssize_t before = H5Fget_obj_count(static_cast<hid_t>(H5F_OBJ_ALL), H5F_OBJ_ALL);
  Foreign([](hid_t file) { create_dataset(file, "/d"); }).expect_refused("another type", DType::u64);
  some_skeleton();
  EXPECT_EQ(H5Fget_obj_count(static_cast<hid_t>(H5F_OBJ_ALL), H5F_OBJ_ALL), before);
}

}  // namespace
}  // namespace fsdp2::checkpoint
