#include "train/metrics/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "nn/core/base/check.h"
#include "train/metrics/npy_header.h"

namespace topknot {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as they lie");

std::string reason() {
  return std::strerror(errno ? errno : EIO);
}

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw UserError(path + ": " + what);
}

// Bytes read, fewer at the end of the file; -1 on an error.
ssize_t read_at(int file, std::byte* out, std::size_t size, std::size_t offset) {
  std::size_t done = 0;
  while (done < size) {
    const ssize_t n = pread(file, out + done, std::min(size - done, std::size_t{1} << 30),
                            static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  return static_cast<ssize_t>(done);
}

void write_all(int file, const std::string& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(file, bytes.data(), std::min(bytes.size(), std::size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) refuse(path, "cannot be written: " + reason() + "; free space or choose another place");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

NpyFile create(const std::string& path) {
  errno = 0;
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) refuse(path, "cannot be written: " + reason() + "; choose another place");
  return NpyFile(file);
}

void write_header(int file, const std::string& path, const char* descr,
                  const std::vector<std::size_t>& shape) {
  const std::string header = npy_header(descr, shape);
  write_all(file, path, std::as_bytes(std::span(header)));
}

// close() reports what a full disk or a lost server kept back.
void close_checked(NpyFile& file, const std::string& path) {
  errno = 0;
  if (::close(file.release()) != 0) refuse(path, "cannot be written: " + reason());
}

template <class T>
void write_array(const std::string& path, const std::vector<std::size_t>& shape, std::span<const T> values) {
  TOPKNOT_CHECK(npy_numel(shape) == values.size(), "as many values as the shape has");
  NpyFile file = create(path);
  write_header(file.get(), path, std::is_same_v<T, double> ? "<f8" : "<f4", shape);
  write_all(file.get(), path, std::as_bytes(values));
  close_checked(file, path);
}

}  // namespace

NpyFile::~NpyFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int NpyFile::release() {
  return std::exchange(descriptor_, -1);
}

NpyReader::NpyReader(const std::string& path)
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (file_.get() < 0) refuse(path, "cannot be read: " + reason());
  struct stat status {};
  if (fstat(file_.get(), &status) != 0) refuse(path, "cannot be read: " + reason());
  if (S_ISDIR(status.st_mode)) refuse(path, "is a folder; give a .npy file");
  if (!S_ISREG(status.st_mode)) refuse(path, "is no regular file; save the array to a .npy file first");
  const auto size = static_cast<std::size_t>(status.st_size);

  std::string start(std::min(size, kNpyLongestStart), '\0');
  if (read_at(file_.get(), reinterpret_cast<std::byte*>(start.data()), start.size(), 0) !=
      static_cast<ssize_t>(start.size()))
    refuse(path, "cannot be read: " + reason());
  const NpyHeader header = parse_npy_header(path, start, size);
  shape_ = header.shape;
  is_double_ = header.is_double;
  data_begin_ = header.data_begin;

  const std::size_t width = is_double_ ? sizeof(double) : sizeof(float);
  const std::optional<std::size_t> numel = npy_numel(shape_);
  if (!numel || *numel > (std::numeric_limits<std::int64_t>::max() - data_begin_) / width)
    refuse(path, "has a shape " + npy_shape_text(shape_) + " beyond any memory; the header is damaged");
  numel_ = *numel;
  const std::size_t expected = data_begin_ + numel_ * width;
  if (size < expected)
    refuse(path, "is truncated: shape " + npy_shape_text(shape_) + " takes " + std::to_string(expected) +
                     " bytes and there are " + std::to_string(size) + "; save it again");
  if (size > expected)
    refuse(path, "has " + std::to_string(size - expected) + " bytes more than its shape " +
                     npy_shape_text(shape_) +
                     " takes; was it being written, or were several arrays saved into one file?");
}

void NpyReader::read_bytes(std::size_t begin, std::span<std::byte> out) const {
  errno = 0;
  const ssize_t got = read_at(file_.get(), out.data(), out.size(), data_begin_ + begin);
  if (got < 0) refuse(path_, "cannot be read: " + reason());
  if (static_cast<std::size_t>(got) < out.size()) refuse(path_, "became shorter while it was read");
}

template <class Stored, class T>
void NpyReader::convert(std::size_t begin, std::span<T> out) const {
  if constexpr (std::is_same_v<Stored, T>) {
    read_bytes(begin * sizeof(T), std::as_writable_bytes(out));
  } else {
    std::vector<Stored> buffer(std::min<std::size_t>(out.size(), 1 << 16));
    for (std::size_t at = 0; at < out.size(); at += buffer.size()) {
      const auto part = std::span(buffer).first(std::min(buffer.size(), out.size() - at));
      read_bytes((begin + at) * sizeof(Stored), std::as_writable_bytes(part));
      std::transform(part.begin(), part.end(), out.begin() + static_cast<std::ptrdiff_t>(at),
                     [](Stored x) { return static_cast<T>(x); });
    }
  }
}

void NpyReader::read(std::size_t begin, std::span<float> out) const {
  TOPKNOT_CHECK(begin <= numel_ && out.size() <= numel_ - begin, "elements outside the array");
  is_double_ ? convert<double>(begin, out) : convert<float>(begin, out);
}

void NpyReader::read(std::size_t begin, std::span<double> out) const {
  TOPKNOT_CHECK(begin <= numel_ && out.size() <= numel_ - begin, "elements outside the array");
  is_double_ ? convert<double>(begin, out) : convert<float>(begin, out);
}

void write_npy(const std::string& path, const std::vector<std::size_t>& shape,
               std::span<const float> values) {
  write_array(path, shape, values);
}

void write_npy(const std::string& path, const std::vector<std::size_t>& shape,
               std::span<const double> values) {
  write_array(path, shape, values);
}

NpyWriter::NpyWriter(const std::string& path, const std::vector<std::size_t>& row_shape)
    : path_(path), shape_(row_shape), file_(create(path)) {
  for (const std::size_t n : row_shape) row_numel_ *= n;
  shape_.insert(shape_.begin(), 0);
  write_header(file_.get(), path_, "<f4", shape_);
}

void NpyWriter::append(std::span<const float> row) {
  TOPKNOT_CHECK(file_.get() >= 0, "append() after close()");
  TOPKNOT_CHECK(row.size() == row_numel_, "a row of another length");
  write_all(file_.get(), path_, std::as_bytes(row));
  ++shape_[0];
}

void NpyWriter::close() {
  TOPKNOT_CHECK(file_.get() >= 0, "close() twice");
  errno = 0;
  if (lseek(file_.get(), 0, SEEK_SET) != 0) refuse(path_, "cannot be written: " + reason());
  write_header(file_.get(), path_, "<f4", shape_);
  close_checked(file_, path_);
}

}  // namespace topknot
