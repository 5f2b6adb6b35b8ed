#pragma once
// The bytes of a compressor's state, for checkpoints: what save() puts, load() gets in the same order.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "nn/base/check.h"
#include "nn/core/device.h"

namespace topknot {

// Floats of a GPU that belong at byte `offset` of a state.
struct DeviceFloats {
  std::size_t offset = 0;
  std::span<const float> values;
};

class StateWriter {
 public:
  // `later`: gets what put_device_list() leaves out; null: it leaves out nothing, and waits for the GPU.
  explicit StateWriter(std::vector<DeviceFloats>* later = nullptr) : later_(later) {}

  template <class V>
  void put(const V& value) {
    static_assert(std::is_trivially_copyable_v<V>);
    append(&value, sizeof value);
  }
  void put_list(const auto& values) {  // contiguous
    const auto bytes = std::as_bytes(std::span(values));
    put<std::uint64_t>(std::size(values));
    append(bytes.data(), bytes.size());
  }
  // The bytes that `put` puts, as a list.
  void put_nested(const auto& put_bytes) {
    put<std::uint64_t>(0);
    const std::size_t begin = bytes_.size();
    put_bytes(*this);
    const std::uint64_t size = bytes_.size() - begin;
    std::memcpy(bytes_.data() + begin - sizeof size, &size, sizeof size);
  }
  // A list of floats in a GPU's memory.
  void put_device_list(std::span<const float> values) {
    put<std::uint64_t>(values.size());
    const std::size_t begin = bytes_.size();
    bytes_.resize(begin + values.size_bytes());
    if (values.empty()) return;
    if (later_) return later_->push_back({begin, values});
    std::vector<float> host(values.size());  // the bytes may not be aligned
    cuda_backend().to_host(host.data(), values.data(), host.size());
    std::memcpy(bytes_.data() + begin, host.data(), values.size_bytes());
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void append(const void* data, std::size_t size) {
    const std::size_t before = bytes_.size();
    bytes_.resize(before + size);
    if (size > 0) std::memcpy(bytes_.data() + before, data, size);
  }
  std::vector<DeviceFloats>* later_;
  std::vector<std::byte> bytes_;
};

// Throws Error if the bytes are not what put() wrote.
class StateReader {
 public:
  explicit StateReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class V>
  V get() {
    static_assert(std::is_trivially_copyable_v<V>);
    V value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  template <class V>
  std::vector<V> get_list() {
    const auto count = get<std::uint64_t>();
    if (count > bytes_.size() / sizeof(V)) fail("is cut off");
    std::vector<V> values(count);
    const auto from = take(count * sizeof(V));
    if (count > 0) std::memcpy(values.data(), from.data(), from.size());
    return values;
  }
  // A list that must have this length, because it belongs to a tensor or group.
  template <class V>
  std::vector<V> get_list(std::size_t length) {
    std::vector<V> values = get_list<V>();
    if (values.size() != length)
      fail("holds " + std::to_string(values.size()) + " values where " + std::to_string(length) +
           " are needed; was it saved by another method, model or merge plan?");
    return values;
  }
  // A list of numbers that are all finite.
  template <class V>
  std::vector<V> get_finite_list() {
    std::vector<V> values = get_list<V>();
    for (const V value : values)
      if (!std::isfinite(value)) fail("has a number that is not finite");
    return values;
  }
  // Two counts, as a group's state begins with: its elements and its selection ranges.
  void expect_group(std::size_t numel, std::size_t segments) {
    const auto elements = get<std::uint64_t>(), ranges = get<std::uint64_t>();
    if (elements != numel || ranges != segments)
      fail("is of " + std::to_string(elements) + " elements in " + std::to_string(ranges) +
           " segments, not of " + std::to_string(numel) + " in " + std::to_string(segments));
  }
  // Elements of the group or range whose state is next; 0: not known.
  std::size_t range = 0;
  float velocity_factor = 1;  // as Compressor::load_state()
  bool at_end() const { return bytes_.empty(); }
  void finish() const {
    if (!bytes_.empty()) fail("has " + std::to_string(bytes_.size()) + " bytes too many");
  }
  [[noreturn]] static void fail(const std::string& what) { throw Error("the compressor's state " + what); }

 private:
  std::span<const std::byte> take(std::size_t size) {
    if (size > bytes_.size()) fail("is cut off");
    const auto result = bytes_.first(size);
    bytes_ = bytes_.subspan(size);
    return result;
  }
  std::span<const std::byte> bytes_;
};

}  // namespace topknot
