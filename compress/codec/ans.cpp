// Runs of zeros between entries at their entropy. Between positions drawn uniformly at density p = count /
// numel runs are geometric; a code by that distribution takes numel H(p) bits, H the binary entropy.
//
//   run = 2^b (32 longs + quotient) + remainder
//
// The remainder's b bits are written as they are. The rest is rANS by one table: a symbol `long` for each
// 32 * 2^b elements without an entry, then the quotient, 0 to 31. b is the largest with 2^b p <= 1/4, so that
// remainders are uniform to 0.004 bits. The table is made of integers, the same on every machine. Above
// density 1/2 the positions without an entry are written instead.
//
// On the wire: for each part of 4096 runs but the last a u32, the 16-bit word at which its stream ends; the
// parts' remainders, in each byte from the lowest bit up, the rest of a part's last byte zero; the parts'
// streams (compress/codec/ans_coder.h). The lower min(b, 16) bits of a part's last remainder are the start of
// its stream instead. A part's first run begins after the last position of the part before, so that threads
// write and read parts side by side.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "compress/codec/ans_coder.h"
#include "compress/codec/bit_stream.h"
#include "compress/codec/codec.h"
#include "compress/parallel.h"

namespace topknot {
namespace {

constexpr std::size_t kRunPart = 4096, kRunPartsPerThread = 4;  // at least
constexpr unsigned kLongBits = 5;
constexpr std::uint32_t kLongRun = 1u << kLongBits;  // its symbol, and its length in units of 2^b

std::size_t run_parts(std::size_t count) {
  return (count + kRunPart - 1) / kRunPart;
}

// Makes the table of the quotients and of `long`. `count` is at most numel / 2.
AnsTable geometric_table(std::size_t count, std::size_t numel, unsigned b) {
  // q = 1 - (1 - p)^(2^b) in units of 2^-62: 1 - (1 - q)^2 = 2 q - q^2.
  const std::uint64_t upper = (std::uint64_t{count} << 32) / numel,
                      rest = (std::uint64_t{count} << 32) % numel;
  std::uint64_t q = upper << 30 | (rest << 30) / numel;
  for (unsigned i = 0; i < b; ++i) q = 2 * q - (q >> 31) * (q >> 31);
  constexpr std::uint64_t kOne = std::uint64_t{1} << 31;
  const std::uint64_t ratio = kOne - (q >> 31);
  std::array<std::uint16_t, kLongRun + 1> ends{};
  std::uint64_t tail = kOne;
  std::uint32_t end = 0;
  for (std::uint32_t symbol = 0; symbol < kLongRun; ++symbol) {
    tail = tail * ratio >> 31;
    constexpr unsigned kShift = 31 - AnsTable::kSlotBits;
    const auto nearest = static_cast<std::uint32_t>((kOne - tail + (1u << (kShift - 1))) >> kShift);
    // A slot at least for each symbol.
    end = std::clamp(nearest, end + 1, AnsTable::kSlots - (kLongRun - symbol));
    ends[symbol] = static_cast<std::uint16_t>(end);
  }
  ends[kLongRun] = AnsTable::kSlots;
  return AnsTable(ends);
}

struct RunModel {
  unsigned b = 0, carried = 0;  // bits of a remainder, and those of a part's last that its stream starts with
  AnsTable table;

  RunModel(std::size_t count, std::size_t numel)
      : b(remainder_bits(count, numel)), carried(std::min(b, 16u)), table(geometric_table(count, numel, b)) {}
  static unsigned remainder_bits(std::size_t count, std::size_t numel) {
    unsigned b = 0;
    while (std::uint64_t{count} << (b + 3) <= numel) ++b;
    return b;
  }
  std::uint32_t remainder(std::uint32_t run) const { return run & ((1u << b) - 1); }
  // Bytes of the remainders of a part of `runs` runs, and of all parts before `part`.
  std::size_t part_bytes(std::size_t runs) const { return (runs * b - carried + 7) / 8; }
  std::size_t bytes_before(std::size_t part) const { return part * part_bytes(kRunPart); }
  std::size_t remainder_bytes(std::size_t count) const {
    const std::size_t before = run_parts(count) - 1;
    return bytes_before(before) + part_bytes(count - before * kRunPart);
  }
};

bool more_than_half(std::size_t count, std::size_t numel) {
  return count > numel / 2;
}

// The positions below numel that are not in `positions`.
std::vector<std::uint32_t> complement(std::span<const std::uint32_t> positions, std::size_t numel) {
  std::vector<std::uint32_t> others(numel - positions.size());
  std::uint32_t next = 0;
  auto to = others.begin();
  for (const std::uint32_t position : positions) {
    for (; next < position; ++next) *to++ = next;
    ++next;
  }
  std::iota(to, others.end(), next);
  return others;
}

// The positions to write: those given, or their complement if it is smaller.
class RarerPositions {
 public:
  RarerPositions(std::span<const std::uint32_t> indices, std::size_t numel)
      : others_(more_than_half(indices.size(), numel) ? complement(indices, numel)
                                                      : std::vector<std::uint32_t>()),
        positions_(more_than_half(indices.size(), numel) ? others_ : indices) {}
  std::span<const std::uint32_t> get() const { return positions_; }

 private:
  std::vector<std::uint32_t> others_;
  std::span<const std::uint32_t> positions_;
};

std::uint32_t run_before(std::span<const std::uint32_t> positions, std::size_t i) {
  return i == 0 ? positions[0] : positions[i] - positions[i - 1] - 1;
}

class RunStreams {
 public:
  RunStreams(std::span<const std::uint32_t> positions, const RunModel& model)
      : room_(room_before(positions, run_parts(positions.size()), model.b)),
        parts_(run_parts(positions.size())) {
    for_each_block(parts_.size(), kRunPartsPerThread, [&](std::size_t part) {
      const std::size_t first = part * kRunPart, last = std::min(positions.size(), first + kRunPart);
      std::uint16_t* const end = room_.data() + room_before(positions, part + 1, model.b);
      const std::uint32_t carried = run_before(positions, last - 1) & ((1u << model.carried) - 1);
      AnsWriter writer(model.table, end, static_cast<std::uint16_t>(carried));
      for (std::size_t i = last; i-- > first;) {
        std::uint32_t quotient = run_before(positions, i) >> model.b;
        writer.put(static_cast<std::uint8_t>(quotient % kLongRun));
        for (; quotient >= kLongRun; quotient -= kLongRun) writer.put(kLongRun);
      }
      parts_[part] = {writer.finish(), end};
    });
  }
  const std::vector<std::span<const std::uint16_t>>& parts() const { return parts_; }
  std::size_t bytes() const {
    std::size_t bytes = 0;
    for (const auto& part : parts_) bytes += part.size_bytes();
    return bytes;
  }

 private:
  // Words that suffice for the streams before that of `part`: one per symbol, of which there is one for each
  // position and at most one for every 2^b kLongRun elements.
  static std::size_t room_before(std::span<const std::uint32_t> positions, std::size_t part, unsigned b) {
    const std::size_t runs = std::min(positions.size(), part * kRunPart);
    const std::size_t elements = runs == 0 ? 0 : std::size_t{positions[runs - 1]} + 1;
    return part * kAnsStateWords + runs + (elements >> (b + kLongBits));
  }

  std::vector<std::uint16_t> room_;
  std::vector<std::span<const std::uint16_t>> parts_;
};

double ans_expected_bytes(std::size_t count, std::size_t numel) {
  if (more_than_half(count, numel)) count = numel - count;
  if (count == 0) return 0.0;
  const auto runs = static_cast<double>(count), p = runs / static_cast<double>(numel);
  const double entropy = -std::log2(p) - (1 - p) / p * std::log2(1 - p);
  // The distance of a remainder's distribution, which falls by exp(-2^b p), from uniform.
  const unsigned b = RunModel::remainder_bits(count, numel);
  const double step = b == 0 ? 0 : std::ldexp(p, static_cast<int>(b)),
               redundancy = step * step / 24 / std::log(2.0);
  // A part costs more than its runs: half a byte of padding, and a state of 32 bits less the min(b, 16) bits
  // that it starts with and the 8 bits of symbols that it holds on average.
  const double part_bytes = 0.5 + (24.0 - std::min(b, 16u)) / 8;
  const auto parts = static_cast<double>(run_parts(count));
  return std::ceil(runs * (entropy + redundancy) / 8 + parts * part_bytes + 4 * (parts - 1));
}

IndexLayout::Size ans_size(std::span<const std::uint32_t> indices, std::size_t numel) {
  const RarerPositions rarer(indices, numel);
  const std::span<const std::uint32_t> positions = rarer.get();
  if (positions.empty()) return {};
  const RunModel model(positions.size(), numel);
  const RunStreams streams(positions, model);
  return {4 * (streams.parts().size() - 1) + model.remainder_bytes(positions.size()) + streams.bytes(), 0};
}

void ans_encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>& out,
                std::vector<std::uint32_t>&) {
  const RarerPositions rarer(indices, numel);
  const std::span<const std::uint32_t> positions = rarer.get();
  if (positions.empty()) return;
  const RunModel model(positions.size(), numel);
  const RunStreams streams(positions, model);
  const auto& parts = streams.parts();
  const std::size_t head = out.size(), remainders = head + 4 * (parts.size() - 1),
                    words = remainders + model.remainder_bytes(positions.size());
  out.resize(words + streams.bytes());
  std::uint32_t end = 0;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    std::memcpy(out.data() + words + 2 * std::size_t{end}, parts[part].data(), parts[part].size_bytes());
    end += static_cast<std::uint32_t>(parts[part].size());
    if (part + 1 < parts.size()) std::memcpy(out.data() + head + 4 * part, &end, sizeof end);
  }
  std::byte* const bits = out.data() + remainders;
  for_each_block(parts.size(), kRunPartsPerThread, [&](std::size_t part) {
    const std::size_t first = part * kRunPart, last = std::min(positions.size(), first + kRunPart);
    BitWriter writer(bits + model.bytes_before(part));
    for (std::size_t i = first; i + 1 < last; ++i)
      writer.put(model.remainder(run_before(positions, i)), model.b);
    writer.put(model.remainder(run_before(positions, last - 1)) >> model.carried, model.b - model.carried);
    writer.flush();
  });
}

// Positions of one part, counted from the part's first possible one.
struct RunPart {
  std::uint64_t elements = 0;      // that the part spans; 0: damaged
  const std::byte* end = nullptr;  // of what was read
};
RunPart read_runs(std::span<const std::byte> remainders, std::span<const std::byte> stream,
                  const RunModel& model, std::size_t numel, std::span<std::uint32_t> out) {
  BitReader bits(remainders.data(), remainders.data() + remainders.size());
  AnsReader symbols(model.table, stream);
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool last = i + 1 == out.size();
    std::uint64_t symbol = symbols.get(), remainder = 0;
    for (; symbol == kLongRun && next < numel; symbol = symbols.get())
      next += std::uint64_t{kLongRun} << model.b;
    if (!bits.get(last ? model.b - model.carried : model.b, remainder)) return {};
    if (last) remainder = remainder << model.carried | symbols.start();
    next += (symbol << model.b) + remainder;
    if (next >= numel) return {};
    out[i] = static_cast<std::uint32_t>(next++);
  }
  const bool good = bits.done() && symbols.done() && symbols.start() >> model.carried == 0;
  return good ? RunPart{next, symbols.at()} : RunPart{};
}

// Fills `out` and returns the bytes used.
std::size_t read_positions(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out) {
  const std::size_t total = run_parts(out.size()), head = 4 * (total - 1);
  const RunModel model(out.size(), numel);
  const std::size_t remainders = model.remainder_bytes(out.size());
  if (in.size() < head + remainders) damaged_block("runs are cut off");
  const std::span<const std::byte> bits = in.subspan(head, remainders), words = in.subspan(head + remainders);
  std::vector<std::size_t> ends(total, words.size());  // in bytes
  for (std::size_t part = 0; part + 1 < total; ++part) {
    std::uint32_t end = 0;
    std::memcpy(&end, in.data() + 4 * part, sizeof end);
    ends[part] = 2 * std::size_t{end};
    if (ends[part] > words.size() || (part > 0 && ends[part] < ends[part - 1]))
      damaged_block("a part's length");
  }

  std::vector<RunPart> parts(total);
  const auto runs_of = [&](std::size_t part) {
    return out.subspan(part * kRunPart, std::min(kRunPart, out.size() - part * kRunPart));
  };
  for_each_block(total, kRunPartsPerThread, [&](std::size_t part) {
    const std::span<std::uint32_t> runs = runs_of(part);
    const std::size_t begin = part == 0 ? 0 : ends[part - 1];
    parts[part] = read_runs(bits.subspan(model.bytes_before(part), model.part_bytes(runs.size())),
                            words.subspan(begin, ends[part] - begin), model, numel, runs);
  });
  std::uint64_t elements = 0;
  for (std::size_t part = 0; part < total; ++part) {
    if (parts[part].elements == 0 || (part + 1 < total && parts[part].end != words.data() + ends[part]))
      damaged_block("a part's runs");
    elements += parts[part].elements;
    parts[part].elements = elements - parts[part].elements;  // now: where the part begins
  }
  if (elements > numel) damaged_block("runs lead beyond the group");
  for_each_block(total, kRunPartsPerThread, [&](std::size_t part) {
    for (std::uint32_t& index : runs_of(part)) index += static_cast<std::uint32_t>(parts[part].elements);
  });
  return static_cast<std::size_t>(parts.back().end - in.data());
}

std::size_t ans_decode(std::span<const std::byte> in, std::size_t numel, std::span<std::uint32_t> out,
                       std::vector<std::uint32_t>&) {
  if (!more_than_half(out.size(), numel)) return read_positions(in, numel, out);
  std::vector<std::uint32_t> others(numel - out.size());
  const std::size_t used = others.empty() ? 0 : read_positions(in, numel, others);
  const std::vector<std::uint32_t> positions = complement(others, numel);
  std::copy(positions.begin(), positions.end(), out.begin());
  return used;
}

const bool ans_registered =
    index_codecs().add("ans", "runs of zeros at their entropy, by rANS", {{&kAnsLayout}});

}  // namespace

const IndexLayout kAnsLayout{5, false, ans_expected_bytes, ans_size, ans_encode, ans_decode};

}  // namespace topknot
