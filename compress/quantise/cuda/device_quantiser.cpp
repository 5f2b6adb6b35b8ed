// signsgd and qsgd on a GPU, the counterpart of compress/quantise/compressor.h, with the same bits in blocks, averages and
// residuals.
#include <algorithm>
#include <utility>

#include "compress/codec/cuda/device_codec.h"
#include "compress/cuda/device_compressor.h"
#include "compress/cuda/device_step_kernels.h"
#include "compress/parallel.h"
#include "compress/quantise/compressor.h"
#include "compress/quantise/cuda/device_quantise_kernels.h"
#include "compress/state.h"
#include "nn/base/check.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

using quantise::Kind;

class DeviceQuantiser final : public DeviceCompressor {
 public:
  DeviceQuantiser(const quantise::Format& format, bool keeps, std::uint64_t seed, const GroupSpec& group)
      : keeps_(keeps),
        ranks_(group.ranks),
        offset_(group.offset),
        rng_(CounterRng(seed, RngUse::compress).stream()),
        ends_(on_device(format.cells)),
        scales_(format.cells.size()),
        broken_(1),
        received_(static_cast<std::size_t>(group.ranks)),
        weights_(static_cast<std::size_t>(group.ranks) + 1) {
    format_.kind = format.kind;
    format_.bits = static_cast<std::uint32_t>(format.bits());
    format_.levels = format.levels;
    format_.numel = static_cast<std::uint32_t>(format.numel);
    format_.cells = static_cast<std::uint32_t>(format.cells.size());
    format_.ends = ends_.data();
    format_.block_bytes = (format.bytes() + 15) / 16 * 16 + kTrailerBytes;
    std::vector<QuantisedPiece> pieces;
    std::vector<std::uint32_t> first;
    std::uint32_t begin = 0;
    for (std::uint32_t cell = 0; cell < format_.cells; ++cell) {
      const std::uint32_t end = format.cells[cell];
      const std::uint32_t length = format.kind == Kind::sign ? std::uint32_t{kChunk} : end - begin;
      first.push_back(static_cast<std::uint32_t>(pieces.size()));
      for (; begin < end; begin = std::min(end, begin + length))
        pieces.push_back({cell, begin, std::min(end, begin + length)});
    }
    first.push_back(static_cast<std::uint32_t>(pieces.size()));
    pieces_ = on_device(pieces);
    first_ = on_device(first);
    sums_ = DeviceArray<double>(pieces.size());
  }

  std::size_t block_bytes() const override { return format_.block_bytes; }

  void encode(cudaStream_t stream, DeviceSlice slice, const StepParameters* step, StepStatus* status,
              std::byte* block) override {
    TOPKNOT_CHECK(slice.gradient.size() == format_.numel, "a slice of another length than the group's");
    slice_ = slice;
    step_ = step;
    quantise_sums(stream, format_, slice.gradient.data(), keeps_ ? slice.spare.data() : nullptr,
                  pieces_.data(), static_cast<std::uint32_t>(pieces_.size()), sums_.data(), broken_.data());
    quantise_scales(stream, format_, sums_.data(), first_.data(), scales_.data(), broken_.data());
    write_quantised(stream, format_, slice.gradient.data(), scales_.data(), broken_.data(), step, rng_,
                    offset_, block, status);
  }

  void decode(cudaStream_t stream, const std::byte* blocks, const float* weights,
              StepStatus* status) override {
    TOPKNOT_CHECK(step_ != nullptr, "decode without encode");
    blocks_ = blocks;
    check_quantised(stream, format_, blocks, ranks_, received_.data());
    judge(stream, received_.data(), ranks_, weights, step_, weights_.data(), status);
  }

  std::span<float> commit(cudaStream_t stream, const StepStatus* status) override {
    TOPKNOT_CHECK(step_ != nullptr, "commit without encode");
    commit_quantised(stream, format_, blocks_, ranks_, weights_.data(), std::exchange(step_, nullptr), status,
                     slice_.gradient.data(), keeps_ ? slice_.spare.data() : nullptr);
    return keeps_ ? slice_.spare : slice_.gradient;
  }

  void set_density(double) override {}
  void save(StateWriter&) const override {}
  void load_state(std::span<const std::byte> bytes) override {
    if (!bytes.empty()) StateReader::fail("has bytes for a method that carries nothing");
  }

 private:
  const bool keeps_;
  const int ranks_;
  const std::uint64_t offset_;
  const PhiloxStream rng_;
  QuantisedFormat format_;
  DeviceArray<std::uint32_t> ends_, first_;  // of the cells; of each, its first piece
  DeviceArray<QuantisedPiece> pieces_;
  DeviceArray<double> sums_;  // by piece
  DeviceArray<float> scales_;
  DeviceArray<std::uint32_t> broken_;
  DeviceArray<DecodedStats> received_;  // by rank
  DeviceArray<float> weights_;          // by rank, then this rank's

  // Of the step under way.
  DeviceSlice slice_;
  const StepParameters* step_ = nullptr;
  const std::byte* blocks_ = nullptr;
};

template <quantise::Format (*format)(const CompressOptions&, const GroupSpec&),
          bool (*keeps)(const CompressOptions&)>
std::unique_ptr<DeviceCompressor> make(const CompressOptions& options, const GroupSpec& group) {
  return std::make_unique<DeviceQuantiser>(format(options, group), keeps(options), options.seed, group);
}

const bool registered = [] {
  device_methods().add("signsgd", "", {make<quantise::signsgd_format, quantise::signsgd_has_residual>});
  device_methods().add("qsgd", "", {make<quantise::qsgd_format, quantise::qsgd_has_residual>});
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
