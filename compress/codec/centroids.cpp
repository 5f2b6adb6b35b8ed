// Value codecs of one and two bits: a value is replaced by the mean of those in its bin. SparseLoCo's quantiser (Sarfi et
// al., arXiv 2508.15706, as released) for centroid2, over all values v of a message:
//
//   c = v - mean(v);  s = sample deviation;  w = 6 s / 4 (1 if that is 0);  bin = clamp(round(c / w + 2), 0, 3)
//
// with halves rounded to even: edges at -2.25 s, -0.75 s and 0.75 s. centroid1 has two bins, below 0 and not. The sum of
// the values that are sent is that of the values themselves, within rounding.
//
// Values that are 2^bits different ones or fewer are sent as they are, so that what was decoded is written again in the
// same bytes. On the wire: 2^bits floats, those in use ascending and first, the others +0; then the codes, 8 / bits a
// byte from the lowest bits on, each the place of a value's float.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "compress/codec/codec.h"

namespace topknot {
namespace {

template <int kBits>
struct Centroids {
  static constexpr std::size_t kBins = std::size_t{1} << kBits, kPerByte = 8 / kBits;
  std::array<float, kBins> table{};
  std::size_t used = 0;

  // False if there are more than kBins different values.
  bool collect(std::span<const float> values) {
    used = 0;
    for (const float value : values) {
      const auto end = table.begin() + static_cast<std::ptrdiff_t>(used),
                 at = std::lower_bound(table.begin(), end, value);
      if (at != end && *at == value) continue;
      if (used == kBins) return false;
      std::copy_backward(at, end, end + 1);
      *at = value + 0.0f;  // no -0
      ++used;
    }
    return true;
  }
  std::size_t place(float value) const {
    return static_cast<std::size_t>(
        std::lower_bound(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(used), value) -
        table.begin());
  }
};

std::size_t bin_of(double centred, double width, std::size_t bins) {
  if (bins == 2) return centred >= 0;
  const double bin = std::nearbyint(centred / width + static_cast<double>(bins) / 2);
  return static_cast<std::size_t>(std::clamp(bin, 0.0, static_cast<double>(bins - 1)));
}

// Each value by the mean of its bin.
template <int kBits>
std::vector<float> quantised(std::span<const float> values) {
  constexpr std::size_t kBins = Centroids<kBits>::kBins;
  const double n = static_cast<double>(values.size());
  double mean = 0, squares = 0;
  if (kBits > 1) {
    for (const float value : values) mean += static_cast<double>(value);
    mean /= n;
    for (const float value : values)
      squares += (static_cast<double>(value) - mean) * (static_cast<double>(value) - mean);
  }
  constexpr double kRange = 6;  // deviations that the bins cover
  double width = n > 1 ? kRange * std::sqrt(squares / (n - 1)) / static_cast<double>(kBins) : 0;
  if (!(width > 0) || !std::isfinite(width)) width = 1;
  std::array<double, kBins> sums{}, counts{};
  for (const float value : values) {
    const double centred = static_cast<double>(value) - mean;
    const std::size_t bin = bin_of(centred, width, kBins);
    sums[bin] += centred;
    counts[bin] += 1;
  }
  std::vector<float> result;
  result.reserve(values.size());
  for (const float value : values) {
    const std::size_t bin = bin_of(static_cast<double>(value) - mean, width, kBins);
    result.push_back(static_cast<float>(sums[bin] / counts[bin] + mean));
  }
  return result;
}

template <int kBits>
std::size_t bytes(std::size_t count) {
  using Table = Centroids<kBits>;
  return count == 0 ? 0 : Table::kBins * sizeof(float) + (count + Table::kPerByte - 1) / Table::kPerByte;
}

template <int kBits>
void encode(std::span<const float> values, std::vector<std::byte>& out) {
  if (values.empty()) return;
  using Table = Centroids<kBits>;
  Table centroids;
  std::vector<float> means;
  if (!centroids.collect(values)) {
    means = quantised<kBits>(values);
    values = means;
    centroids.table = {};
    centroids.collect(values);
  }
  const std::size_t head = out.size(), table = sizeof centroids.table;
  out.resize(head + bytes<kBits>(values.size()));
  std::memcpy(out.data() + head, centroids.table.data(), table);
  for (std::size_t i = 0; i < values.size(); ++i)
    out[head + table + i / Table::kPerByte] |=
        static_cast<std::byte>(centroids.place(values[i]) << (i % Table::kPerByte * kBits));
}

template <int kBits>
void decode(std::span<const std::byte> in, std::span<float> out) {
  if (out.empty()) return;
  using Table = Centroids<kBits>;
  Table centroids;
  std::memcpy(centroids.table.data(), in.data(), sizeof centroids.table);
  const std::span<const std::byte> codes = in.subspan(sizeof centroids.table);
  std::array<bool, Table::kBins> seen{};
  for (std::size_t i = 0; i < codes.size() * Table::kPerByte; ++i) {
    const std::size_t code =
        std::to_integer<std::size_t>(codes[i / Table::kPerByte]) >> (i % Table::kPerByte * kBits) &
        (Table::kBins - 1);
    if (i >= out.size()) {
      if (code != 0) damaged_block("bits behind the last code");
      continue;
    }
    seen[code] = true;
    out[i] = centroids.table[code];
  }
  for (std::size_t j = 0; j < Table::kBins; ++j) {
    const float value = centroids.table[j];
    const bool zero = std::bit_cast<std::uint32_t>(value) == 0, negative_zero = value == 0 && !zero;
    if (seen[j] ? negative_zero || (j > 0 && (!seen[j - 1] || !(centroids.table[j - 1] < value))) : !zero)
      damaged_block("centroids that do not ascend, or are not used");
  }
}

template <int kBits>
ValueCodec codec(std::uint8_t id) {
  return {.id = id,
          .exact = false,
          .fills = false,
          .bytes = bytes<kBits>,
          .encode = encode<kBits>,
          .decode = decode<kBits>};
}

const bool centroids_registered = [] {
  value_codecs().add("centroid2", "2 bits per value, the means of four bins by deviation", codec<2>(4));
  value_codecs().add("centroid1", "1 bit per value, the means of what is below 0 and what is not",
                     codec<1>(5));
  return true;
}();

}  // namespace
}  // namespace topknot
