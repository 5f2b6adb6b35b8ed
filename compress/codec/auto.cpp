// Each message in the layout in which it is smallest, values of fillers counted; ties to the lower number.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "compress/codec/codec.h"
#include "nn/base/check.h"

namespace topknot {
namespace {

// Nothing: every element is sent. Only compress.codec auto has it, because what is selected decides whether it
// fits.
class AllLayout final : public IndexLayout {
 public:
  std::uint8_t id() const override { return 4; }
  bool fits(std::size_t count, std::size_t numel) const override { return count == numel && count > 0; }

  double expected_bytes(std::size_t, std::size_t) const override { return 0.0; }

  Size size(std::span<const std::uint32_t>, std::size_t) const override { return {}; }

  void encode(std::span<const std::uint32_t> indices, std::size_t numel, std::vector<std::byte>&,
              std::vector<std::uint32_t>&) const override {
    TOPKNOT_CHECK(indices.size() == numel, "not every element is sent");
  }

  std::size_t decode(std::span<const std::byte>, std::size_t numel, std::span<std::uint32_t> out,
                     std::vector<std::uint32_t>&) const override {
    if (out.size() != numel)
      damaged_block(fmt::format("{} entries without positions, of {}", out.size(), numel));
    std::iota(out.begin(), out.end(), 0u);
    return 0;
  }
};

class AutoIndexCodec final : public IndexCodec {
 public:
  explicit AutoIndexCodec(const CompressOptions& options) {
    for (const char* name : {"raw", "run16", "rice", "bitmap"}) {
      owned_.push_back(index_codecs().find(name)(options));
      layouts_.push_back(owned_.back()->find(static_cast<std::uint8_t>(layouts_.size())));
    }
    layouts_.push_back(&all_);
  }

  const IndexLayout& choose(std::span<const std::uint32_t> indices, std::size_t numel,
                            const ValueCodec& values) const override {
    const std::size_t count = indices.size();
    const IndexLayout* best = layouts_[kRaw];
    if (count == 0) return *best;
    std::size_t least = 0;
    for (const IndexLayout* layout : layouts_) {
      if (!layout->fits(count, numel)) continue;
      const IndexLayout::Size size = layout->size(indices, numel);
      const std::size_t bytes = size.bytes + values.bytes(count + size.fillers);
      if (layout != layouts_[kRaw] && bytes >= least) continue;
      best = layout;
      least = bytes;
    }
    return *best;
  }
  const IndexLayout* find(std::uint8_t id) const override {
    for (const IndexLayout* layout : layouts_)
      if (layout->id() == id) return layout;
    return nullptr;
  }
  double expected_bytes(std::size_t count, std::size_t numel) const override {
    double least = layouts_[kRaw]->expected_bytes(count, numel);
    // run16 is the smallest only for a handful of entries: what its fillers' values take is left aside.
    for (const IndexLayout* layout : layouts_)
      if (layout != layouts_[kRun16] && layout->fits(count, numel))
        least = std::min(least, layout->expected_bytes(count, numel));
    return least;
  }

 private:
  enum Id { kRaw, kRun16 };
  AllLayout all_;
  std::vector<std::unique_ptr<IndexCodec>> owned_;
  std::vector<const IndexLayout*> layouts_;  // by number
};

const bool auto_registered = [] {
  index_codecs().add("auto", "whichever is smallest, message by message",
                     [](const CompressOptions& options) -> std::unique_ptr<IndexCodec> {
                       return std::make_unique<AutoIndexCodec>(options);
                     });
  return true;
}();

}  // namespace
}  // namespace topknot
