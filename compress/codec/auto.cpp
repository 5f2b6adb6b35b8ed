// Each message in the layout in which it is smallest, values of fillers counted; ties to the lower number.
#include <algorithm>
#include <array>

#include "compress/codec/layouts.h"

namespace topknot {
namespace {

class AutoIndexCodec final : public IndexCodec {
 public:
  const IndexLayout& choose(std::span<const std::uint32_t> indices, std::size_t numel,
                            const ValueCodec& values) const override {
    const std::size_t count = indices.size();
    const IndexLayout* best = &raw_;
    if (count == 0) return *best;
    std::size_t least = 0;
    for (const IndexLayout* layout : layouts_) {
      if (!layout->fits(count, numel)) continue;
      const IndexLayout::Size size = layout->size(indices, numel);
      const std::size_t bytes = size.bytes + values.bytes(count + size.fillers);
      if (layout != &raw_ && bytes >= least) continue;
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
    double least = raw_.expected_bytes(count, numel);
    // run16 is the smallest only for a handful of entries: what its fillers' values take is left aside.
    for (const IndexLayout* layout : layouts_)
      if (layout != &run16_ && layout->fits(count, numel))
        least = std::min(least, layout->expected_bytes(count, numel));
    return least;
  }

 private:
  RawLayout raw_;
  Run16Layout run16_;
  RiceLayout rice_;
  BitmapLayout bitmap_;
  AllLayout all_;
  std::array<const IndexLayout*, 5> layouts_ = {&raw_, &run16_, &rice_, &bitmap_, &all_};
};

const bool auto_registered = [] {
  index_codecs().add("auto", "whichever is smallest, message by message",
                     [](const CompressOptions&) -> std::unique_ptr<IndexCodec> {
                       return std::make_unique<AutoIndexCodec>();
                     });
  return true;
}();

}  // namespace
}  // namespace topknot
