#include "compress/select/regtopk_score.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "compress/select/cuda/device_selector.h"
#include "compress/select/cuda/regtopk_kernels.h"
#include "compress/state.h"
#include "nn/core/cuda/context.h"

namespace topknot::cuda {
namespace {

// The entries of the last step, by range, in GPU memory.
class LastMemory {
 public:
  LastMemory() = default;
  explicit LastMemory(const std::vector<std::size_t>& capacities) {
    const std::size_t all = std::accumulate(capacities.begin(), capacities.end(), std::size_t{0});
    indices_ = DeviceArray<std::uint32_t>(all);
    own_ = DeviceArray<double>(all);
    surplus_ = DeviceArray<double>(all);
    kept_ = DeviceArray<float>(all);
    std::size_t at = 0;
    for (const std::size_t capacity : capacities) {
      last_.push_back({indices_.data() + at, own_.data() + at, surplus_.data() + at, kept_.data() + at,
                       static_cast<std::uint32_t>(capacity)});
      at += capacity;
    }
    table_ = on_device(last_);
  }
  const RegTopKLast* on_gpu() const { return table_.data(); }
  const RegTopKLast& operator[](std::size_t range) const { return last_[range]; }

 private:
  DeviceArray<std::uint32_t> indices_;
  DeviceArray<double> own_, surplus_;
  DeviceArray<float> kept_;
  std::vector<RegTopKLast> last_;
  DeviceArray<RegTopKLast> table_;
};

template <class T>
void copy(T* to, const T* from, std::size_t count, cudaMemcpyKind kind) {
  if (count == 0) return;
  TOPKNOT_CUDA(cudaMemcpyAsync(to, from, count * sizeof(T), kind, Context::current().stream()));
}

// CUDA counterpart of RegTopKSelector. Its scores hold tanh in double: a GPU's may differ from the host's in the last bit, so that a score, which is
// rounded to float, differs in its last bit about once in 2^28, and only where that bit decides who is the k-th does
// another entry are sent.
class RegTopKOnGpu final : public DeviceSelector {
 public:
  RegTopKOnGpu(const CompressOptions& options, const std::vector<DeviceRange>& ranges)
      : ranges_(ranges),
        rule_(regtopk_score(options)),
        last_(std::vector<std::size_t>(ranges.size())),
        controls_(on_device(std::vector<RegTopKControl>(ranges.size()))) {}

  std::size_t capacity(std::size_t n, double density) const override { return target_count(density, n); }

  std::size_t list_limit(std::size_t n, double density) const override {
    return topknot::list_limit(target_count(density, n));
  }
  void set_density(const std::vector<double>& densities) override {
    std::vector<std::size_t> capacities;
    for (std::size_t r = 0; r < ranges_.size(); ++r)
      capacities.push_back(capacity(ranges_[r].n, densities[r]));
    reserve(capacities);
  }

  void select(cudaStream_t stream, const SelectRanges& ranges, const Accumulate& accumulate,
              const StepParameters* parameters) override {
    regtopk_select(stream, rule_, ranges, work(), accumulate, parameters);
  }

  void commit(cudaStream_t stream, const SelectRanges& ranges, const StepStatus* status,
              const DeviceOutcome& outcome) override {
    regtopk_commit(stream, ranges, work(), status, outcome);
  }

  void save(StateWriter& writer) const override {
    const std::vector<RegTopKControl> controls = controls_on_host();
    for (std::size_t r = 0; r < ranges_.size(); ++r) {
      const std::size_t count = controls[r].last;
      std::vector<std::uint32_t> indices(count);
      std::vector<double> own(count), surplus(count);
      copy(indices.data(), last_[r].indices, count, cudaMemcpyDeviceToHost);
      copy(own.data(), last_[r].own, count, cudaMemcpyDeviceToHost);
      copy(surplus.data(), last_[r].surplus, count, cudaMemcpyDeviceToHost);
      Context::current().synchronize();
      writer.put_list(indices);
      writer.put_list(own);
      writer.put_list(surplus);
      writer.put(controls[r].weight);
    }
  }

  void load(StateReader& reader) override {
    std::vector<RegTopKControl> controls = controls_on_host();
    std::vector<std::size_t> counts(ranges_.size());
    for (std::size_t r = 0; r < ranges_.size(); ++r) {
      const auto indices = reader.get_list<std::uint32_t>();
      const auto own = reader.get_list<double>(indices.size());
      const auto surplus = reader.get_list<double>(indices.size());
      const auto weight = reader.get<double>();
      if (std::adjacent_find(indices.begin(), indices.end(), std::greater_equal<>()) != indices.end())
        StateReader::fail("names the entries of regtopk's last step out of order");
      if (!indices.empty() && indices.back() >= ranges_[r].n)
        StateReader::fail("names entries of regtopk's last step beyond the vector");
      counts[r] = indices.size();
      reserve(counts);
      copy(last_[r].indices, indices.data(), indices.size(), cudaMemcpyHostToDevice);
      copy(last_[r].own, own.data(), own.size(), cudaMemcpyHostToDevice);
      copy(last_[r].surplus, surplus.data(), surplus.size(), cudaMemcpyHostToDevice);
      Context::current().synchronize();
      controls[r].last = static_cast<std::uint32_t>(indices.size());
      controls[r].weight = weight;
    }
    copy(controls_.data(), controls.data(), controls.size(), cudaMemcpyHostToDevice);
    Context::current().synchronize();
  }

 private:
  RegTopKWork work() const { return {controls_.data(), last_.on_gpu()}; }

  std::vector<RegTopKControl> controls_on_host() const {
    Context::current().synchronize();
    std::vector<RegTopKControl> controls(controls_.size());
    copy(controls.data(), controls_.data(), controls.size(), cudaMemcpyDeviceToHost);
    Context::current().synchronize();
    return controls;
  }

  // Room for so many entries of each range at least; the last step's stay. A fall of density leaves it as it is,
  // because more were sent in the last step than will be in the next.
  void reserve(std::vector<std::size_t> capacities) {
    bool enough = true;
    for (std::size_t r = 0; r < capacities.size(); ++r) {
      enough &= capacities[r] <= last_[r].capacity;
      capacities[r] = std::max<std::size_t>(capacities[r], last_[r].capacity);
    }
    if (enough) return;
    LastMemory larger(capacities);
    for (std::size_t r = 0; r < capacities.size(); ++r) {
      const RegTopKLast from = last_[r], to = larger[r];
      copy(to.indices, from.indices, from.capacity, cudaMemcpyDeviceToDevice);
      copy(to.own, from.own, from.capacity, cudaMemcpyDeviceToDevice);
      copy(to.surplus, from.surplus, from.capacity, cudaMemcpyDeviceToDevice);
    }
    last_ = larger;
  }

  std::vector<DeviceRange> ranges_;
  RegTopKScore rule_;
  LastMemory last_;
  DeviceArray<RegTopKControl> controls_;
};

const bool regtopk_registered = [] {
  add_device_selector<RegTopKOnGpu>("regtopk");
  return true;
}();

}  // namespace
}  // namespace topknot::cuda
