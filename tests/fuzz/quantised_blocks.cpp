// Quantised blocks of each kind, in cells of one length.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "compress/quantise/block.h"
#include "nn/base/check.h"
#include "tests/fuzz/fuzz_target.h"

namespace topknot::fuzz {
namespace {

using quantise::Format;
using quantise::Kind;

struct Shape {
  std::string name;
  Kind kind;
  std::uint32_t levels;
  std::size_t cell;
};

Format format_of(const Shape& shape, std::size_t numel) {
  Format format{shape.kind, shape.levels, numel, {}};
  for (std::size_t end = shape.cell; end < numel; end += shape.cell)
    format.cells.push_back(std::uint32_t(end));
  if (numel > 0) format.cells.push_back(std::uint32_t(numel));
  return format;
}

float some_scale(Random& random) {
  if (random.one_in(8)) return 0.0f;
  if (random.one_in(8)) return std::numeric_limits<float>::max();
  const float any = std::bit_cast<float>(std::uint32_t(random.bits() >> 33));
  return std::isfinite(any) ? any : 1.0f;
}

std::int16_t some_code(const Shape& shape, Random& random) {
  if (shape.kind == Kind::sign) return std::int16_t(random.below(2));
  const auto most = int(shape.levels);
  return std::int16_t(int(random.below(2 * shape.levels + 1)) - most);
}

Sample make(const Shape& shape, Random& random) {
  Sample sample;
  sample.numel = random.below(random.one_in(64) ? 5000 : 120);
  const Format format = format_of(shape, sample.numel);
  const bool finite = !random.one_in(64);
  sample.block = quantise::start_block(format, finite);
  if (!finite) return sample;
  std::vector<float> scales(format.cells.size());
  for (float& scale : scales) scale = some_scale(random);
  quantise::write_scales(format, scales, sample.block);
  std::vector<std::int16_t> codes(sample.numel);
  for (std::int16_t& code : codes) code = some_code(shape, random);
  quantise::write_codes(format, codes, 0, codes.size(), sample.block);
  return sample;
}

bool accept(const Shape& shape, std::span<const std::byte> block, std::size_t numel) {
  constexpr float untouched = 7.0f;
  const Format format = format_of(shape, numel);
  std::vector<float> values(numel, untouched);
  bool finite = false;
  try {
    finite = quantise::read_block(format, block, values);
  } catch (const Error&) {
    return false;
  }
  require(block.size() == (finite ? format.bytes() : quantise::kHeaderBytes), "the length of its kind");
  std::size_t cell = 0;
  for (std::size_t i = 0; i < numel; ++i) {
    if (!finite) {
      require(values[i] == untouched, "no values of a step that is not finite");
      continue;
    }
    if (i == format.cells[cell]) ++cell;
    float scale;
    std::memcpy(&scale, block.data() + quantise::kHeaderBytes + cell * sizeof scale, sizeof scale);
    require(std::isfinite(scale) && !std::signbit(scale), "scales that are magnitudes");
    const float magnitude = std::abs(values[i]);
    require(magnitude <= scale, "values within their scale");
    if (shape.kind != Kind::levels)
      require(magnitude == scale || (magnitude == 0 && shape.kind == Kind::ternary), "scales or zeros");
  }
  return true;
}

const bool added = [] {
  for (const Shape& shape :
       {Shape{"sign", Kind::sign, 1, 50}, Shape{"levels/1", Kind::levels, 1, 16},
        Shape{"levels/5", Kind::levels, 5, 37}, Shape{"levels/127", Kind::levels, 127, 64},
        Shape{"levels/32767", Kind::levels, 32767, 9}, Shape{"ternary", Kind::ternary, 1, 41}})
    fuzz_targets().add(shape.name, "quantised block",
                       {[shape](Random& random) { return make(shape, random); },
                        [shape](std::span<const std::byte> block, std::size_t numel) {
                          return accept(shape, block, numel);
                        }});
  return true;
}();

}  // namespace
}  // namespace topknot::fuzz
