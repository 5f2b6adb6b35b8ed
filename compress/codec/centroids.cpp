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
//
// centroid2_ans is centroid2 with its codes at their entropy: of what a selection by magnitude leaves, two of the four
// bins have nearly all, and a code takes little more than a bit. On the wire: the floats; how many values have each, as
// u32; the codes by rANS (compress/codec/ans_coder.h), a code's slots in proportion to its count.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "compress/codec/ans_coder.h"
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

// The centroids of the values, which are replaced by them.
template <int kBits>
Centroids<kBits> centroids_of(std::span<const float>& values, std::vector<float>& means) {
  Centroids<kBits> centroids;
  if (centroids.collect(values)) return centroids;
  means = quantised<kBits>(values);
  values = means;
  centroids.table = {};
  centroids.collect(values);
  return centroids;
}

// Throws unless what was used ascends and stands first, and the rest is +0.
template <int kBits>
void check_table(const Centroids<kBits>& centroids, const std::array<bool, Centroids<kBits>::kBins>& seen) {
  for (std::size_t j = 0; j < seen.size(); ++j) {
    const float value = centroids.table[j];
    const bool zero = std::bit_cast<std::uint32_t>(value) == 0, negative_zero = value == 0 && !zero;
    if (seen[j] ? negative_zero || (j > 0 && (!seen[j - 1] || !(centroids.table[j - 1] < value))) : !zero)
      damaged_block("centroids that do not ascend, or are not used");
  }
}

template <int kBits>
void encode(std::span<const float> values, std::vector<std::byte>& out) {
  if (values.empty()) return;
  using Table = Centroids<kBits>;
  std::vector<float> means;
  const Table centroids = centroids_of<kBits>(values, means);
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
  check_table(centroids, seen);
}

// Codes at their entropy.

using Counts = std::array<std::uint32_t, Centroids<2>::kBins>;

// Gives each code its rounded share of the slots, at least one; the most frequent takes the remainder.
AnsTable slots_of(const Counts& counts) {
  std::uint64_t all = 0;
  for (const std::uint32_t count : counts) all += count;
  std::array<std::uint32_t, Centroids<2>::kBins> slots{};
  std::uint32_t given = 0;
  for (std::size_t j = 0; j < counts.size(); ++j) {
    slots[j] = static_cast<std::uint32_t>(
        std::max<std::uint64_t>(1, (2 * std::uint64_t{counts[j]} * AnsTable::kSlots + all) / (2 * all)));
    given += slots[j];
  }
  const auto most = static_cast<std::size_t>(std::max_element(counts.begin(), counts.end()) - counts.begin());
  slots[most] += AnsTable::kSlots - given;  // may wrap on the way
  std::array<std::uint16_t, Centroids<2>::kBins> ends{};
  std::uint32_t end = 0;
  for (std::size_t j = 0; j < slots.size(); ++j) ends[j] = static_cast<std::uint16_t>(end += slots[j]);
  return AnsTable(ends);
}

constexpr std::size_t kAnsHead = sizeof(Centroids<2>::table) + sizeof(Counts);

// For normal values beyond two deviations a code takes a bit, within 1 %.
std::size_t expected_ans_bytes(std::size_t count) {
  return count == 0 ? 0 : kAnsHead + sizeof(std::uint32_t) + (count * 33 + 255) / 256;
}

// A code has 4,093 of 4,096 slots at most, and then takes a thousandth of a bit.
std::size_t least_ans_bytes(std::size_t count) {
  return count == 0 ? 0 : kAnsHead + count / 8192;
}

void encode_ans(std::span<const float> values, std::vector<std::byte>& out) {
  if (values.empty()) return;
  std::vector<float> means;
  const Centroids<2> centroids = centroids_of<2>(values, means);
  Counts counts{};
  std::vector<std::uint8_t> codes;
  codes.reserve(values.size());
  for (const float value : values)
    ++counts[codes.emplace_back(static_cast<std::uint8_t>(centroids.place(value)))];
  const AnsTable table = slots_of(counts);
  std::vector<std::uint16_t> words(values.size() + kAnsStateWords);
  AnsWriter writer(table, words.data() + words.size());
  for (std::size_t i = codes.size(); i-- > 0;) writer.put(codes[i]);
  const std::uint16_t* const begin = writer.finish();
  const auto stream = std::as_bytes(std::span<const std::uint16_t>(begin, words.data() + words.size()));
  const auto head = std::as_bytes(std::span(centroids.table)), uses = std::as_bytes(std::span(counts));
  for (const auto& part : {head, uses}) out.insert(out.end(), part.begin(), part.end());
  out.insert(out.end(), stream.begin(), stream.end());
}

void decode_ans(std::span<const std::byte> in, std::span<float> out) {
  if (out.empty()) return;
  if (in.size() < kAnsHead) damaged_block("centroids are cut off");
  Centroids<2> centroids;
  Counts counts{}, found{};
  std::memcpy(centroids.table.data(), in.data(), sizeof centroids.table);
  std::memcpy(counts.data(), in.data() + sizeof centroids.table, sizeof counts);
  std::uint64_t all = 0;
  std::array<bool, Centroids<2>::kBins> used{};
  for (std::size_t j = 0; j < counts.size(); ++j) all += counts[j], used[j] = counts[j] > 0;
  if (all != out.size()) damaged_block("counts of centroids that are not those of the values");
  check_table<2>(centroids, used);
  const AnsTable table = slots_of(counts);
  AnsReader reader(table, in.subspan(kAnsHead));
  for (float& value : out) {
    const std::uint8_t code = reader.get();
    ++found[code];
    value = centroids.table[code];
  }
  if (!reader.done() || reader.start() != 0 || reader.at() != in.data() + in.size() || found != counts)
    damaged_block("codes that are not those of their counts");
}

template <int kBits>
ValueCodec codec(std::uint8_t id) {
  return {.id = id, .fills = false, .bytes = bytes<kBits>, .encode = encode<kBits>, .decode = decode<kBits>};
}

const bool centroids_registered[] = {
    value_codecs().add("centroid2", "2 bits per value, the means of four bins by deviation", codec<2>(4)),
    value_codecs().add("centroid1", "1 bit per value, the means of what is below 0 and what is not",
                       codec<1>(5)),
    value_codecs().add("centroid2_ans", "centroid2 with codes at their entropy, little more than a bit",
                       {.id = 7,
                        .fills = false,
                        .bytes = expected_ans_bytes,
                        .encode = encode_ans,
                        .decode = decode_ans,
                        .least = least_ans_bytes})};

}  // namespace
}  // namespace topknot
